"""Interrupts the quantization of a folder at random moments, and compares the resumed run's files.

    python -m tests.faults.interrupted_quantize [--rounds 200] [--method mse] [--seed 0]

Each round ends a run: by SIGKILL at a random moment, or by a limit on the size of files, like a full disk.
A run that finishes is compared with an uninterrupted one, byte by byte, and the next round begins anew; so it
does where SIGKILL came after the last byte.
Prints a JSON line of counts.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch

from tests.faults.forked import REFUSED, exit_code, fork
from tests.support.models import tiny, token_ids
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.recipe import Recipe


def digests(folder: Path) -> dict[str, str]:
    """Returns a digest of each file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def interrupt(rounds: int, method: str, seed: int, folder: Path) -> dict[str, int]:
    """Interrupts runs of one method; returns counts of outcomes.

    Raises:
        RuntimeError: a run failed otherwise, or a resumed run wrote other bytes.
    """
    draw = random.Random(seed)
    torch.set_num_threads(1)  # a forked process has no others
    source, out = folder / "float", folder / "out"
    tiny("llama", torch.bfloat16, num_hidden_layers=3).save_pretrained(source)
    calibration = token_ids(4, 16) if method in CALIBRATED else None

    def run(to: Path) -> None:
        quantize_folder(source, to, Recipe(method=method), progress=False, calibration=calibration)

    began = time.perf_counter()
    assert exit_code(fork(lambda: run(folder / "whole"))) == 0
    longest = time.perf_counter() - began
    expected = digests(folder / "whole")
    largest = max(path.stat().st_size for path in (folder / "whole").iterdir())
    counts: collections.Counter[str] = collections.Counter()
    for number in range(rounds + 1):
        last = number == rounds
        full = draw.random() < 0.3 and not last
        child = fork(lambda: run(out), draw.randrange(largest) if full else None)
        if not full and not last:
            time.sleep(draw.random() * longest)
            os.kill(child, signal.SIGKILL)
        code = exit_code(child)
        if code == 0:
            if (found := digests(out)) != expected:
                names = sorted(name for name, _ in found.items() ^ expected.items())
                raise RuntimeError(f"round {number} of seed {seed}: the resumed run wrote other {names}")
            shutil.rmtree(out)
            counts["finished"] += 1
        elif code == -signal.SIGKILL and not full and out.exists() and digests(out) == expected:
            shutil.rmtree(out)  # it was complete, and a complete folder is not written again
            counts["too late"] += 1
        elif code == -signal.SIGKILL and not full:
            counts["killed"] += 1
        elif code == REFUSED and full:
            counts["full"] += 1
        else:
            raise RuntimeError(f"round {number} of seed {seed}: the run exited with {code}")
    return dict(counts)


def main() -> None:
    """Runs the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--method", default="mse")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = interrupt(options.rounds, options.method, options.seed, Path(folder))
    print(json.dumps({"method": options.method, "seed": options.seed, **counts}))


if __name__ == "__main__":
    main()
