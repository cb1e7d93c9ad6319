"""Rates of a model on two processes of one thread, beside one process with two threads.

    python -m bench.parallel --shape 1b [--stages | --whole-experts] [--ranks 2] [--rounds 5]
    python -m bench.parallel --exchange [--rounds 200]

The processes are tensor parallel ranks, which have whole experts with ``--whole-experts``, or stages of a
pipeline with ``--stages``, whose prompts are computed in chunks of 128 tokens.  Weights are random; both
engines hold the same.  They take turns.  Prints a JSON line for each kind of load: tokens a second (medians),
the median of the ratios of neighboring rounds, and if the tokens are the same.  With ``--exchange``, two
pinned processes gather columns of one token: microseconds of one exchange as an instruction of a plan, by the
bytes of the whole row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median

import torch
from transformers import AutoConfig

import torch_armllm  # noqa: F401  registers the format of saved models
from bench.peers.shapes import SHAPES
from torch_armllm import LLM, SamplingParams
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.ops.collective import open_communicator
from torch_armllm.parallel.shared_memory import BUFFER_BYTES, GroupMemory
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.program import Operand, Program

LOADS = {"prompt 512": (1, 512, 1), "decode 1": (1, 16, 64), "decode 8": (8, 16, 64)}
"""Sequences, prompt tokens, and tokens to generate."""
_CHUNK = 128
"""Tokens of a step of a pipeline: a prompt is computed in several steps, which are under way together."""
_EXCHANGES = 500
"""Exchanges of one plan: its call, and its threads' start, take no part of their time."""


def generate(llm: LLM, load: str, seed: int) -> tuple[float, list[list[int]]]:
    """Returns the seconds that a load takes after its prompts, or of its prompt, and its tokens."""
    sequences, prompt, tokens = LOADS[load]
    random = Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine = llm.llm_engine
    began = time.perf_counter()
    for number in range(sequences):
        ids = [random.randrange(10, llm.vocab_size) for _ in range(prompt)]
        engine.add_request(str(number), ids, params)
    first, found = 0.0, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if len(found) == sequences and not first:
            first = time.perf_counter()
    ended = time.perf_counter()
    return (ended - began) if tokens == 1 else (ended - first), [found[name] for name in sorted(found)]


def compare(one: LLM, several: LLM, load: str, rounds: int) -> dict[str, float | bool]:
    """Returns the rates of one process and of several ranks, in turn, and their ratio."""
    sequences, prompt, tokens = LOADS[load]
    count = prompt if tokens == 1 else sequences * (tokens - 1)
    pairs, same = [], True
    # an engine's threads belong to the thread that calls it
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:

        def run(at: int, seed: int) -> tuple[float, list[list[int]]]:
            pool, llm = ((first, one), (second, several))[at]
            return pool.submit(generate, llm, load, seed).result()

        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            results = {at: run(at, number) for at in order}
            same = same and results[0][1] == results[1][1]
            pairs.append((results[0][0], results[1][0]))
    alone, together = zip(*pairs[1:], strict=True)
    return {
        "one": round(count / median(alone), 1),
        "ranks": round(count / median(together), 1),
        "ratio": round(median([a / b for a, b in zip(alone, together, strict=True)]), 3),
        "same tokens": same,
    }


def measure(
    shape: str,
    ranks: int,
    rounds: int,
    stages: bool,
    whole_experts: bool,
    report: Callable[[str], object] = print,
) -> None:
    """Measures all loads of a shape."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(AutoConfig.for_model(**SHAPES[shape].config), Path(folder))
        settings = {"skip_tokenizer_init": True, "progress": False, "speculative_config": None}
        settings |= {"enable_prefix_caching": False, "kv_cache_memory": 512 << 20}
        one = LLM(folder, tensor_parallel_size=1, threads=ranks, **settings)
        if stages:
            settings |= {"pipeline_parallel_size": ranks, "max_num_batched_tokens": _CHUNK}
        else:
            settings |= {"tensor_parallel_size": ranks, "enable_expert_parallel": whole_experts}
        several = LLM(folder, threads=1, **settings)
        for load in LOADS:
            report(json.dumps({"shape": shape, "load": load, **compare(one, several, load, rounds)}))


def exchange(rank: int, file: int, rounds: int) -> dict[int, float]:
    """Returns the microseconds of an exchange of one token's columns, by the bytes of the row."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    memory = GroupMemory(2, file=file)
    handle = open_communicator(memory.exchanges[0], rank, 2, BUFFER_BYTES)
    found = {}
    for size in (4096, 16384, 65536):
        columns = size // 4
        program = Program()
        rows = program.allocate(columns // 2, torch.float32)
        table = program.constant(torch.randn(1, columns // 2))
        ids = Operand("input", 0, torch.int64)
        program.emit("embed", out=rows, ids=ids, table=table, width=columns // 2, vocab_size=1)
        parts = [{"columns": columns // 2}] * 2
        for _ in range(_EXCHANGES):
            out = program.allocate(columns, torch.float32)
            program.emit("gather_columns", x=rows, out=out, communicator=handle, parts=parts)
        assert out.storage is not None
        program.outputs.append(out.storage)
        plan = NativePlan(lay_out(program))
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            plan._run(plan._handle, [torch.zeros(1, 1, dtype=torch.int64)], 1)
            times.append(time.perf_counter() - began)
        found[size] = round(median(times) / _EXCHANGES * 1e6, 2)
    return found


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--stages", action="store_true", help="a pipeline, in place of tensor parallel ranks")
    kinds.add_argument("--whole-experts", action="store_true", help="whole experts, in place of columns")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        exchange(*options.rank, options.rounds)
    elif options.exchange:
        file = GroupMemory(2).file
        command = [sys.executable, "-m", "bench.parallel", "--rounds", str(options.rounds)]
        with subprocess.Popen([*command, "--rank", "1", str(file)], pass_fds=[file]):
            print(json.dumps(exchange(0, file, options.rounds)))
    else:
        measure(options.shape, options.ranks, options.rounds, options.stages, options.whole_experts)


if __name__ == "__main__":
    main()
