"""Rates with the default draft tokens beside those without, on texts that repeat much and on chat.

    python -m bench.draft_tokens [--model smollm2] [--work edit,chat] [--sequences 1,4]
        [--tokens 256] [--rounds 5]

``edit`` asks for a function of Python's standard library with a variable renamed; ``chat`` asks questions.
Answers are greedy.  Rounds alternate between ``speculative_config="auto"`` and None on one model; prompts are
in the prefix cache, so that decoding is what is timed.  Rows have the median rates, their ratio, and the
number of answers that differ, which must be 0.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch

import torch_armllm
from bench.case import Row, in_rounds, ratios, run
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


def _answers(
    llm: LLM, prompts: list[Any], sequences: int, tokens: int, _: int
) -> tuple[list[list[int]], float]:
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


def draft_tokens(
    *,
    model: str = "smollm2",
    work: tuple[str, ...] = ("edit", "chat"),
    sequences: tuple[int, ...] = (1, 4),
    tokens: Annotated[int, "most tokens of an answer"] = 256,
    rounds: int = 5,
) -> Iterator[Row]:
    loaded, tokenizer = load_model(model, torch.bfloat16), load_tokenizer(model)
    torch_armllm.patch(loaded, progress=False)
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "progress": False}
    engines = {
        way: LLM(loaded, tokenizer, speculative_config=None if way == "none" else way, **settings)
        for way in ("none", "auto")
    }
    for kind in work:
        prompts = []
        for request in requests(kind):
            chat = [{"role": "user", "content": request}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompts.append({"prompt_token_ids": tokenizer(text, add_special_tokens=False).input_ids})
        for count in sequences:
            sides = {way: partial(_answers, llm, prompts, count, tokens) for way, llm in engines.items()}
            found = in_rounds(sides, rounds)
            rates = {way: [rate for _, rate in each] for way, each in found.items()}
            pairs = zip(found["none"], found["auto"], strict=True)
            each = sorted(ratios(rates["auto"], rates["none"]))
            yield {
                "work": kind,
                "at_a_time": count,
                **{f"{way}_tok_s": median(rates[way]) for way in engines},
                "ratio": median(rates["auto"]) / median(rates["none"]),
                "least": each[0],
                "most": each[-1],
                "differ": sum(
                    a != b for (one, _), (other, _) in pairs for a, b in zip(one, other, strict=True)
                ),
            }


if __name__ == "__main__":
    run(draft_tokens)
