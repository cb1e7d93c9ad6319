"""Runs the fuzz targets for a time, each in a process of its own, and prints counts.

    python -m tests.fuzz.run --hours 0.5
    python -m tests.fuzz.run --target checkpoint-gguf --seed 1234 --count 1

A process takes many seeds at a time, as a round trip between processes costs more than a call of an op.
One that dies by a signal, or takes longer than --patience for one seed, is a finding as well; the next
process goes on with the next seed.  The exit status is 1 if there are findings.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from typing import Any

from tests.fuzz.targets import TARGETS, target_named

_STARTUP = 120.0
"""Seconds that imports and a corpus may take before the first seed."""
_MOST_AT_ONCE = 4096
"""Seeds that a process takes at a time, at most."""
_BATCH_SECONDS = 0.25
"""Time that a batch of seeds should take."""
_SHOWN = 10
"""Findings of one kind that are printed."""


@dataclass
class Tally:
    """Counts of one target."""

    inputs: int = 0
    findings: Counter[str] = field(default_factory=Counter)


def _serve(name: str, connection: Connection, current: Any) -> None:
    """Runs in the child: takes ranges of seeds, and sends back each seed that has a finding, then None."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # progress bars, warnings of libraries
    target = target_named(name)
    connection.send(None)
    while (seeds := connection.recv()) is not None:
        for seed in range(*seeds):
            current.value = seed
            try:
                target(seed)
            except BaseException:
                connection.send((seed, traceback.format_exc()))
        connection.send(None)


class Worker:
    """A child process that runs one target."""

    def __init__(self, name: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._current: Any = RawValue("q", -1)
        self._process = context.Process(target=_serve, args=(name, theirs, self._current), daemon=True)
        self._process.start()
        theirs.close()
        self.ended = False
        """True once the process ended or stopped."""
        self._answer(_STARTUP)
        self._warm = False

    def run(self, first: int, end: int, patience: float) -> list[tuple[int, str]]:
        """Runs the seeds ``first`` to ``end - 1``, and returns those with findings.

        The last one is the seed at which the process ended, if it did; later seeds have not run.
        """
        patience, self._warm = patience if self._warm else max(patience, _STARTUP), True
        self._current.value = first
        return self._answer(patience, (first, end))

    def _answer(self, patience: float, seeds: tuple[int, int] | None = None) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        try:
            if seeds is not None:
                self._connection.send(seeds)
            while True:
                seed = self._current.value
                if self._connection.poll(patience):
                    answer: tuple[int, str] | None = self._connection.recv()
                    if answer is None:
                        return found
                    found.append(answer)
                elif self._current.value == seed:
                    self.ended = True
                    return [*found, (seed, f"no answer within {patience:g} s")]
        except (EOFError, ConnectionError):
            self._process.join()
            self.ended = True
            return [*found, (self._current.value, f"the process ended with status {self._process.exitcode}")]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def fuzz(name: str, seconds: float, seed: int, count: int | None, patience: float) -> Tally:
    """Runs one target for some seconds, or for a number of seeds, and prints its findings."""
    tally = Tally()
    worker = Worker(name)
    end = time.monotonic() + seconds
    batch = 1
    while time.monotonic() < end if count is None else tally.inputs < count:
        if count is not None:
            batch = min(batch, count - tally.inputs)
        begin = time.monotonic()
        found = worker.run(seed, seed + batch, patience)
        ran = found[-1][0] + 1 - seed if worker.ended else batch
        tally.inputs += ran
        for wrong, finding in found:
            last = finding.strip().splitlines()[-1]
            kind = last.partition(":")[0] if "Traceback" in finding else last
            tally.findings[kind] += 1
            if tally.findings[kind] <= _SHOWN:
                print(f"{name}, seed {wrong}:\n{finding}", flush=True)
        if worker.ended:
            worker.close()
            worker = Worker(name)
        seed += ran
        took = (time.monotonic() - begin) / ran
        batch = max(1, min(_MOST_AT_ONCE, 2 * batch, int(_BATCH_SECONDS / max(took, 1e-9))))
    worker.close()
    return tally


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--hours", type=float, default=1 / 60, help="time of all targets together (a minute)")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="only this one; repeatable"
    )
    parser.add_argument("--seed", type=int, default=None, help="the first seed; default: the time")
    parser.add_argument("--count", type=int, help="seeds of each target, instead of a time")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a seed may take (10)")
    options: Any = parser.parse_args(arguments)
    names = options.target or list(TARGETS)
    seed = int(time.time()) * 1000 if options.seed is None else options.seed
    tallies = {}
    for name in names:
        seconds = options.hours * 3600 / len(names)
        tallies[name] = tally = fuzz(name, seconds, seed, options.count, options.patience)
        findings = ", ".join(f"{count} {kind}" for kind, count in tally.findings.items()) or "none"
        print(f"{name:32} {tally.inputs:9,} inputs from seed {seed}; findings: {findings}", flush=True)
    total = sum(tally.inputs for tally in tallies.values())
    found = sum(tally.findings.total() for tally in tallies.values())
    print(f"{total:,} inputs, {found:,} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
