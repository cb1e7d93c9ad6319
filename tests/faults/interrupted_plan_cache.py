"""Interrupts the writing of the plan cache at random moments, and loads the model again.

    python -m tests.faults.interrupted_plan_cache [--rounds 50] [--seed 0]

Each round ends a process that loads a tiny folder of packed weights and stores its plan: by SIGKILL at a
random moment, mostly while it writes the entry, or by a limit on the size of files, like a full disk; a full
disk must not end the process. The next process has to compute the same tokens, and to leave a valid entry and
no scratch file. Prints a JSON line of counts.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import torch_armllm
from tests.faults.forked import exit_code, fork
from tests.support.models import tiny
from torch_armllm import LLM, Recipe, SamplingParams
from torch_armllm.llm.loading import cached_loader
from torch_armllm.llm.plan_cache import entry

_PROMPTS = [[5, 6, 7], [9] * 40, [3]]
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
_OLD = 10**9
"""Time of scratch files that are surely of an earlier process, in seconds since 1970."""


def load(folder: Path) -> LLM:
    """Loads the model as a process does that starts."""
    return LLM(str(folder), skip_tokenizer_init=True, progress=False, threads=1, kv_cache_memory=4 << 20)


def tokens(llm: LLM) -> list[list[int]]:
    """Returns what the model generates."""
    return [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, _GREEDY, use_tqdm=False)]


def interrupt(rounds: int, seed: int, folder: Path) -> dict[str, int]:
    """Interrupts processes that store a plan; returns counts of outcomes.

    Raises:
        RuntimeError: a later process failed, computed other tokens, or left the cache in disorder.
    """
    draw = random.Random(seed)
    torch.set_num_threads(1)  # a forked process has no others
    model = tiny("llama", torch.bfloat16)
    torch_armllm.quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(folder / "model")
    os.environ["ARMLLM_PLAN_CACHE"] = "0"
    expected = tokens(load(folder / "model"))  # it also imports everything, before processes are forked
    os.environ["ARMLLM_PLAN_CACHE"] = "1"
    os.environ["XDG_CACHE_HOME"] = str(folder)
    counts: collections.Counter[str] = collections.Counter()
    store = cached_loader.store

    def check(stored: bool | None = None, begun: int | None = None) -> None:
        def reported(*arguments: Any) -> str | None:
            os.write(begun, b"1")  # type: ignore[arg-type]
            reason = store(*arguments)
            os.write(begun, b"2")  # type: ignore[arg-type]
            return reason

        if begun is not None:
            cached_loader.store = reported
        llm = load(folder / "model")
        if tokens(llm) != expected:
            raise RuntimeError("other tokens")
        if stored is not None and llm.has_model is stored:
            raise RuntimeError("the plan is not in the cache")

    longest, size = 0.0, 1
    for number in range(-1, rounds):
        kind = "whole" if number < 0 else draw.choice(["killed", "killed", "full"])
        readable, writable = os.pipe()
        most = draw.randrange(size) if kind == "full" else None
        child = fork(lambda begun=writable: check(begun=begun), most)  # type: ignore[misc]
        os.close(writable)
        os.read(readable, 1)  # it begins to store; nothing where it ends before
        began = time.perf_counter()
        if kind == "killed":
            time.sleep(draw.random() * longest)
            os.kill(child, signal.SIGKILL)
        os.read(readable, 1)
        longest = time.perf_counter() - began if kind == "whole" else longest
        os.close(readable)
        code = exit_code(child)
        if kind == "killed" and code == 0:
            kind = "too late"  # it had ended
        elif code != (-signal.SIGKILL if kind == "killed" else 0):
            raise RuntimeError(f"round {number} of seed {seed}: {kind}, and the process exited with {code}")
        counts[kind] += 1
        for scratch in scratch_files():
            counts["scratch files"] += 1
            os.utime(scratch, (_OLD, _OLD))
        for stored in (None, True):
            if code := exit_code(fork(lambda stored=stored: check(stored))):  # type: ignore[misc]
                raise RuntimeError(f"round {number} of seed {seed}: the next process exited with {code}")
        if left := scratch_files():
            raise RuntimeError(f"round {number} of seed {seed}: {left} are left")
        (file,) = entry.folder().iterdir()
        size = file.stat().st_size
        file.unlink()
    return dict(counts)


def scratch_files() -> list[Path]:
    """Returns the files of the cache that are not entries."""
    folder = entry.folder()
    found = folder.iterdir() if folder.exists() else ()
    return [file for file in found if file.suffix != ".safetensors"]


def main() -> None:
    """Runs the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = interrupt(options.rounds, options.seed, Path(folder))
    print(json.dumps({"seed": options.seed, **counts}))


if __name__ == "__main__":
    main()
