"""Rates of a model on two processes of one thread, beside one process with two threads.

    python -m bench.parallel --shape 1b [--stages | --whole-experts] [--ranks 2] [--rounds 5]

The processes are tensor parallel ranks, which have whole experts with ``--whole-experts``, or stages of a
pipeline with ``--stages``, whose prompts are computed in chunks of 128 tokens.  Weights are random; both
engines hold the same.  They take turns.  A row for each kind of load has tokens a second (medians), the
median of the ratios of neighboring rounds, and if the tokens are the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Annotated

import torch_armllm  # noqa: F401  registers the format of saved models
from bench.case import Row, in_rounds, random_folder, ratios, run
from bench.engine_steps import QUIET, greedy
from bench.peers.work import random_tokens
from torch_armllm import LLM
from torch_armllm.engine.text.preprocess import NewRequest

LOADS = {"prompt 512": (1, 512, 1), "decode 1": (1, 16, 64), "decode 8": (8, 16, 64)}
"""Sequences, prompt tokens, and tokens to generate."""
_CHUNK = 128
"""Tokens of a step of a pipeline: a prompt is computed in several steps, which are under way together."""


def generate(llm: LLM, load: str, seed: int) -> tuple[float, list[list[int]]]:
    """Returns the seconds that a load takes after its prompts, or of its prompt, and its tokens."""
    sequences, prompt, tokens = LOADS[load]
    engine = llm.llm_engine
    began = time.perf_counter()
    for number in range(sequences):
        ids = random_tokens(prompt, llm.vocab_size, (seed, number))
        engine.add_request(NewRequest(str(number), {"prompt_token_ids": ids}, greedy(tokens)))
    first, found = 0.0, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if len(found) == sequences and not first:
            first = time.perf_counter()
    ended = time.perf_counter()
    return ended - (began if tokens == 1 else first), [found[name] for name in sorted(found)]


def compare(one: LLM, several: LLM, load: str, rounds: int) -> Row:
    """Returns the rates of one process and of several ranks, in turn, and their ratio."""
    sequences, prompt, tokens = LOADS[load]
    count = prompt if tokens == 1 else sequences * (tokens - 1)
    # an engine's threads belong to the thread that calls it
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        sides = {
            name: lambda number, pool=pool, llm=llm: pool.submit(generate, llm, load, number).result()
            for name, pool, llm in (("one", first, one), ("ranks", second, several))
        }
        found = in_rounds(sides, rounds)
    seconds = {name: [spent for spent, _ in each] for name, each in found.items()}
    same = all(a == b for (_, a), (_, b) in zip(*found.values(), strict=True))
    rates = {name: count / median(each) for name, each in seconds.items()}
    return {**rates, "ratio": median(ratios(seconds["one"], seconds["ranks"])), "same_tokens": same}


def parallel(
    *,
    shape: str = "1b",
    stages: Annotated[bool, "a pipeline, in place of tensor parallel ranks"] = False,
    whole_experts: Annotated[bool, "whole experts, in place of columns"] = False,
    ranks: int = 2,
    rounds: int = 5,
) -> Iterator[Row]:
    settings = {**QUIET, "enable_prefix_caching": False, "kv_cache_memory": 512 << 20}
    divided = {"tensor_parallel_size": ranks, "enable_expert_parallel": whole_experts}
    if stages:
        divided = {"pipeline_parallel_size": ranks, "max_num_batched_tokens": _CHUNK}
    with random_folder(shape) as folder:
        one = LLM(str(folder), tensor_parallel_size=1, threads=ranks, **settings)
        several = LLM(str(folder), threads=1, **divided, **settings)
        for load in LOADS:
            yield {"shape": shape, "load": load, **compare(one, several, load, rounds)}


if __name__ == "__main__":
    run(parallel)
