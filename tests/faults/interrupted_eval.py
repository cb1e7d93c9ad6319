"""Interrupts evaluations at random moments, and compares the table of the resumed run.

    python -m tests.faults.interrupted_eval [--rounds 50] [--seed 0]

Each round ends `torch-armllm eval --json` of a tiny model: by SIGKILL at a random moment, or by a limit on
the size of files, like a full disk. A run that finishes is compared with an uninterrupted one: the same
table, and no files of a run that was interrupted. The next round begins anew. Prints a JSON line of counts.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import signal
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
import lm_eval.tasks
import torch

from tests.faults.forked import REFUSED, exit_code, fork
from tests.support.evaluation_tasks import write_tasks
from tests.support.tiny_server import checkpoint
from torch_armllm.cli.main import build_parser

_SCHEMES = "f32,int4-row"
_VOCABULARY = 259
assert lm_eval.simple_evaluate  # imported before processes are forked


def evaluate(model: Path, tasks: Path, out: Path) -> None:
    """Runs the command.

    Raises:
        OSError: the disk is full.
    """
    arguments = ["eval", str(model), "--include-path", str(tasks), "--tasks", "own_text,own_letters"]
    arguments += ["--limit", "4", "--quantization", _SCHEMES, "--dtype", "float32"]
    options = build_parser().parse_args([*arguments, f"--json={out}/out.json", f"--markdown={out}/out.md"])
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        options.run(options)


def outcome(folder: Path) -> dict[str, Any]:
    """Returns the results of a finished run: its tables, and the names of its files."""
    content = json.loads((folder / "out.json").read_text())
    page = re.sub(r"\d+ s$", "", (folder / "out.md").read_text(), flags=re.MULTILINE)  # without times
    return {"table": repr(content["table"]), "page": page, "files": sorted(os.listdir(folder))}


def interrupt(rounds: int, seed: int, folder: Path) -> dict[str, int]:
    """Interrupts runs; returns counts of outcomes.

    Raises:
        RuntimeError: a run failed otherwise, or a resumed run had other results.
    """
    draw = random.Random(seed)
    torch.set_num_threads(1)  # a forked process has no others
    # without lm-eval's own tasks, whose index takes seconds
    few = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    lm_eval.tasks.TaskManager = lambda include_path=None, **_: few(include_path=include_path)
    model, tasks = checkpoint(folder / "model"), write_tasks(folder)
    for name in ("whole", "out"):
        (folder / name).mkdir()

    def run(to: str) -> None:
        evaluate(model, tasks, folder / to)

    if exit_code(fork(lambda: run("whole"))):  # also fills the cache of datasets
        raise RuntimeError("the first run failed")
    expected = outcome(folder / "whole")
    (folder / "whole/out.json").unlink()
    began = time.perf_counter()
    exit_code(fork(lambda: run("whole")))
    longest = time.perf_counter() - began
    found = json.loads((folder / "whole/out.json").read_text())
    tokens = found["schemes"]["f32"]["tasks"]["own_text"]["distributions"]["tokens"]
    sizes = (folder / "whole/out.json").stat().st_size, 4 * _VOCABULARY * tokens
    counts: collections.Counter[str] = collections.Counter()
    for number in range(rounds + 1):
        last = number == rounds
        full = draw.random() < 0.4 and not last
        child = fork(lambda: run("out"), draw.randrange(draw.choice(sizes)) if full else None)
        if not full and not last:
            time.sleep(draw.random() * longest)
            os.kill(child, signal.SIGKILL)
        code = exit_code(child)
        if code == 0:
            if (found := outcome(folder / "out")) != expected:
                names = [name for name in expected if found[name] != expected[name]]
                raise RuntimeError(f"round {number} of seed {seed}: other {names}:\n{found}\n{expected}")
            for file in (folder / "out").iterdir():
                file.unlink()
            counts["finished"] += 1
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
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/datasets"
        counts = interrupt(options.rounds, options.seed, Path(folder))
    print(json.dumps({"seed": options.seed, **counts}))


if __name__ == "__main__":
    main()
