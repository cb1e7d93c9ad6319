"""Rate of ``model.generate`` beside the engine's, on one model and the same prompts.

    python -m bench.generate_rate [--model smollm2] [--rows 1,8] [--tokens 128] [--rounds 5]

Rounds alternate between ``LLM.generate``, the patched ``model.generate``, and transformers' own loop on the
same patched model.  Rows have medians in generated tokens a second, prompts of 32 tokens included, and the
ratios to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch

import torch_armllm
from bench.case import Row, in_rounds, run
from bench.engine_steps import greedy, timed
from torch_armllm import LLM
from torch_armllm.checkpoint.load import load_model

PROMPT = 32


def generate_rate(
    *, model: str = "smollm2", rows: tuple[int, ...] = (1, 8), tokens: int = 128, rounds: int = 5
) -> Iterator[Row]:
    patched = load_model(model, torch.bfloat16)
    torch_armllm.patch(patched, progress=False)
    llm = LLM(patched, enable_prefix_caching=False, speculative_config=None, progress=False)
    settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    for count in rows:
        ids = torch.randint(
            5, min(1000, llm.vocab_size), (count, PROMPT), generator=torch.Generator().manual_seed(0)
        )
        prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
        calls = {
            "LLM.generate": lambda p=prompts: llm.generate(p, greedy(tokens), use_tqdm=False),
            "model.generate": lambda ids=ids: patched.generate(ids, **settings),
            "transformers' loop": lambda ids=ids: type(patched).generate(patched, ids, **settings),
        }
        seconds = in_rounds({name: lambda _, call=call: timed(call) for name, call in calls.items()}, rounds)
        rates = {name: count * tokens / median(found) for name, found in seconds.items()}
        for name, rate in rates.items():
            yield {"rows": count, "by": name, "tok_s": rate, "of_engine": rate / rates["LLM.generate"]}


if __name__ == "__main__":
    run(generate_rate)
