"""Rates with the default draft tokens beside those without, on texts that repeat much and on chat.

    python -m bench.draft_tokens [--model smollm2] [--work edit,chat] [--sequences 1,4]
        [--tokens 256] [--rounds 5]

``edit`` asks for a function of Python's standard library with a variable renamed; ``chat`` asks questions.
Answers are greedy.  Rounds alternate between ``speculative_config="auto"`` and None on one model; prompts are
in the prefix cache, so that decoding is what is timed.  Prints the median rates, their ratio, and the share
of answers that differ, which must be 0.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time
from typing import Any

import torch

import torch_armllm
from torch_armllm import LLM, SamplingParams
from torch_armllm.checkpoint.load import load_model, load_tokenizer

_QUESTIONS = (
    "Why is the sky blue at noon and red in the evening?",
    "How do I keep bread fresh for a week?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What is the difference between a virus and a bacterium?",
    "Plan a weekend in Lisbon for two people who like museums.",
    "Explain how a refrigerator works to a child.",
    "Give me advice for my first job interview.",
    "What should I consider before I adopt a dog?",
)
_FUNCTIONS = (
    (json.JSONEncoder.iterencode, "markers", "seen"),
    (textwrap.dedent, "margin", "indent"),
    (json.dump, "fp", "stream"),
    (textwrap.TextWrapper._wrap_chunks, "cur_line", "line"),
    (argparse.ArgumentParser.format_help, "formatter", "writer"),
    (inspect.getdoc, "doc", "text"),
    (statistics.correlation, "xbar", "mean_x"),
    (json.loads, "kw", "options"),
)


def requests(work: str) -> list[str]:
    """Returns eight requests of a user."""
    if work == "chat":
        return list(_QUESTIONS)
    return [
        f"Here is a Python function:\n\n```python\n{textwrap.dedent(inspect.getsource(function))}```\n\n"
        f"Rename the variable `{old}` to `{new}`. Answer with the whole function."
        for function, old, new in _FUNCTIONS
    ]


def answers(llm: LLM, prompts: list[Any], sequences: int, tokens: int) -> tuple[list[list[int]], float]:
    """Answers prompts, ``sequences`` at a time.

    Returns:
        The tokens of each answer, and the number of tokens a second.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens)
    found: list[list[int]] = []
    begin = time.perf_counter()
    for first in range(0, len(prompts), sequences):
        outputs = llm.generate(prompts[first : first + sequences], params, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found, sum(map(len, found)) / (time.perf_counter() - begin)


def main() -> None:
    """Measures and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for torch_armllm.LLM")
    parser.add_argument("--work", default="edit,chat")
    parser.add_argument("--sequences", default="1,4")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, torch.bfloat16), load_tokenizer(options.model)
    torch_armllm.patch(model, progress=False)
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "progress": False}
    engines = {
        way: LLM(model, tokenizer, speculative_config=None if way == "none" else way, **settings)
        for way in ("none", "auto")
    }
    for work in options.work.split(","):
        prompts: list[Any] = []
        for request in requests(work):
            chat = [{"role": "user", "content": request}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompts.append({"prompt_token_ids": tokenizer(text, add_special_tokens=False).input_ids})
        for sequences in map(int, options.sequences.split(",")):
            rates: dict[str, list[float]] = {way: [] for way in engines}
            differ = 0
            for number in range(options.rounds + 1):  # the first round warms up
                found = {}
                for way, llm in engines.items():
                    found[way], rate = answers(llm, prompts, sequences, options.tokens)
                    if number:
                        rates[way].append(rate)
                differ += sum(a != b for a, b in zip(found["none"], found["auto"], strict=True))
            plain, auto = (statistics.median(rates[way]) for way in engines)
            each = sorted(a / b for a, b in zip(rates["auto"], rates["none"], strict=True))
            print(
                f"{work}, {sequences} at a time: {plain:.0f} tokens/s without, {auto:.0f} with draft tokens: "
                f"{auto / plain:.3f} (rounds {each[0]:.3f} to {each[-1]:.3f}); {differ} answers differ",
                flush=True,
            )


if __name__ == "__main__":
    main()
