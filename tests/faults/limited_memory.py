"""Runs an engine whose process may not take more memory, with a limit that differs from round to round.

    python -m tests.faults.limited_memory [--rounds 30] [--seed 0]

Each round bounds the address space a little above what the process has, generates for long prompts, and lifts
the bound. A refused allocation has to end the requests of its step with an error that says so; the KV cache
keeps its size, and the next requests get the same tokens as before. Prints a JSON line of counts.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import random
import resource
import tempfile
from pathlib import Path

from tests.support.tiny_server import checkpoint
from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.errors import StepFailedError
from torch_armllm.system.allocator import release_free_memory

_LEFT = (16, 25)
"""A round leaves 2^16 to 2^25 bytes."""
_PROBE = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _tokens(llm: LLM) -> list[int]:
    return llm.generate([[5, 6, 7]], _PROBE, use_tqdm=False)[0].outputs[0].token_ids


def limit(rounds: int, seed: int, folder: Path) -> dict[str, int]:
    """Generates under random limits; returns counts of outcomes.

    Raises:
        RuntimeError: an error does not name memory, later tokens differ, or the cache has another size.
    """
    draw = random.Random(seed)
    checkpoint(folder)
    llm = LLM(str(folder), kv_cache_memory=64 << 20, max_num_seqs=64, max_num_batched_tokens=8192, threads=1)
    expected, size = _tokens(llm), llm.llm_engine.runner.kv_bytes
    counts: collections.Counter[str] = collections.Counter()
    for number in range(rounds):
        prompts = [
            [draw.randrange(5, 200) for _ in range(draw.randrange(50, 500))]
            for _ in range(draw.randrange(1, 41))
        ]
        params = SamplingParams(
            temperature=draw.choice((0.0, 1.0)),
            top_p=draw.choice((0.9, 1.0)),
            max_tokens=3,
            logprobs=draw.choice((None, 3)),
            prompt_logprobs=draw.choice((None, None, 2)),
            ignore_eos=True,
        )
        gc.collect()
        release_free_memory()
        bound = _address_space() + int(2 ** draw.uniform(*_LEFT))
        resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))
        try:
            llm.generate(prompts, params, use_tqdm=False)
            counts["finished"] += 1
        except (MemoryError, StepFailedError) as error:
            if "memory" not in repr(error).lower():
                raise RuntimeError(f"round {number}: {error!r} does not name memory") from error
            counts["refused"] += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if (found := _tokens(llm)) != expected:
            raise RuntimeError(f"round {number}: the tokens are {found}, and were {expected}")
        if llm.llm_engine.runner.kv_bytes != size:
            raise RuntimeError(f"round {number}: the KV cache no longer has its {size} bytes")
    return dict(counts)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.limited_memory", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(limit(options.rounds, options.seed, Path(folder))))


if __name__ == "__main__":
    main()
