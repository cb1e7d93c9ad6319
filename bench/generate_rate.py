"""Rate of ``model.generate`` beside the engine's, on one model and the same prompts.

    python -m bench.generate_rate [--model smollm2] [--rows 1,8] [--tokens 128] [--rounds 5]

Rounds alternate between ``LLM.generate``, the patched ``model.generate``, and transformers' own loop on the
same patched model.  Prints the medians in generated tokens a second, prompts of 32 tokens included, and the
ratios to the engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import torch_armllm
from torch_armllm import LLM, SamplingParams
from torch_armllm.checkpoint.load import load_model

PROMPT = 32


def generators(model: Any, llm: LLM, rows: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """Returns what is timed, by name; each call generates the tokens of all rows."""
    ids = torch.randint(5, 1000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    prompts: list[Any] = [{"prompt_token_ids": row} for row in ids.tolist()]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    return {
        "LLM.generate": lambda: llm.generate(prompts, params, use_tqdm=False),
        "model.generate": lambda: model.generate(ids, **settings),
        "transformers' loop": lambda: type(model).generate(model, ids, **settings),
    }


def main() -> None:
    """Measures and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for torch_armllm.LLM")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = load_model(options.model, torch.bfloat16)
    torch_armllm.patch(model, progress=False)
    llm = LLM(model, enable_prefix_caching=False, speculative_config=None, progress=False)
    for rows in map(int, options.rows.split(",")):
        timed = generators(model, llm, rows, options.tokens)
        rates: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(options.rounds + 1):  # the first round warms up
            for name, run in timed.items():
                begin = time.perf_counter()
                run()
                seconds = time.perf_counter() - begin
                if number:
                    rates[name].append(rows * options.tokens / seconds)
        engine = statistics.median(rates["LLM.generate"])
        for name, values in rates.items():
            rate = statistics.median(values)
            print(f"{rows} rows, {name}: {rate:.0f} tokens/s, {rate / engine:.3f} of the engine's")


if __name__ == "__main__":
    main()
