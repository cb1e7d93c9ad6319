"""Cycles of counted code by llvm-mca's models of Arm cores.

This is a model, not silicon: all loads hit the L1 cache, all branches are predicted, loads never wait for
stores, and instruction fetch takes no time.  Loops are rebuilt from the counts.  A loop is modeled as a whole
if its body, with inner loops unrolled by their counted iterations, is short enough.  A longer loop is the sum
of its inner loops and of the rest of its own body.  A function counts as a loop over its calls.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.arm.counting import Counts
from bench.arm.disassembly import branch_target, disassemble, is_conditional, kind, neutral, tool

MAX_BODY = 3000  # instructions that are modeled as one body
MIN_RUN = 6000  # instructions of a run of llvm-mca: long enough that its start and end hardly count
MIN_SHARE = 0.005  # regions below this share of the instructions run at the average speed of the others


@dataclass
class Region:
    """A function, a loop, or the rest of a loop without its inner loops, over ``low … high``."""

    low: int
    high: int
    iterations: int
    name: str
    children: list[Region] = field(default_factory=list)


@dataclass
class Share:
    """Contribution of a modeled region."""

    name: str
    instructions: int
    iterations: int
    cycles: dict[str, float]
    kinds: Counter[str]


class Mca:
    """Cached runs of llvm-mca."""

    def __init__(self, cache: Path | None = None) -> None:
        self._path = cache
        self._cycles: dict[str, float] = json.loads(cache.read_text()) if cache and cache.exists() else {}

    def save(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._cycles))

    def cycles(self, body: list[str], cpu: str) -> float:
        """Return the cycles of one iteration of ``body`` in an endless loop."""
        source = "\n".join(map(neutral, body)) + "\n"
        key = hashlib.sha256(f"{cpu}\n{source}".encode()).hexdigest()[:24]
        if key not in self._cycles:
            few = 2
            many = few + max(2, MIN_RUN // len(body))
            first, last = (self._total(source, cpu, n) for n in (few, many))
            self._cycles[key] = (last - first) / (many - few)
        return self._cycles[key]

    @staticmethod
    def _total(source: str, cpu: str, iterations: int) -> int:
        run = subprocess.run(
            [tool("llvm-mca"), "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+all", f"-iterations={iterations}"]
            + ["-instruction-info=0", "-resource-pressure=0"],
            input=source,
            capture_output=True,
            text=True,
        )
        match = re.search(r"Total Cycles:\s+(\d+)", run.stdout)
        if match is None:
            raise RuntimeError(f"llvm-mca cannot model this on {cpu}: {run.stderr.strip()[:300]}")
        return int(match[1])


class Model:
    """The loops of counted code, and their cycles."""

    def __init__(self, counts: Counts, functions: list[tuple[int, str]], mca: Mca) -> None:
        self.counts, self.mca = counts, mca
        names = disassemble(counts.opcodes.values())
        self.text = {at: names[opcode] for at, opcode in counts.opcodes.items()}
        self._addresses = sorted(counts.executions)
        self._functions = functions

    def cycles(self, cpus: tuple[str, ...]) -> tuple[dict[str, float], list[Share]]:
        """Return all cycles by CPU, and the regions that they come from, largest first."""
        shares = [s for region in self._regions() for s in self._shares(region, cpus)]
        shares.sort(key=lambda s: -s.instructions)
        modeled = sum(s.instructions for s in shares if s.cycles)
        total = {
            cpu: sum(s.cycles[cpu] for s in shares if s.cycles) * self.counts.total / max(1, modeled)
            for cpu in cpus
        }
        return total, shares

    def _own(self, region: Region) -> list[int]:
        """Return the addresses of the region outside its children."""
        own = []
        for at in self._span(region.low, region.high):
            if not any(child.low <= at <= child.high for child in region.children):
                own.append(at)
        return own

    def _span(self, low: int, high: int) -> list[int]:
        return self._addresses[
            bisect.bisect_left(self._addresses, low) : bisect.bisect_right(self._addresses, high)
        ]

    def _executed(self, addresses: list[int]) -> int:
        return sum(self.counts.executions[at] for at in addresses)

    def _regions(self) -> Iterator[Region]:
        starts = [address for address, _ in self._functions]
        by_function: dict[int, list[int]] = {}
        for at in self._addresses:
            by_function.setdefault(bisect.bisect_right(starts, at) - 1, []).append(at)
        for index, inside in by_function.items():
            name = self._functions[index][1] if index >= 0 else "?"
            calls = self.counts.executions[inside[0]]
            yield self._nest(Region(inside[0], inside[-1], max(1, calls), name))

    def _nest(self, function: Region) -> Region:
        heads: dict[int, int] = {}
        for at in self._span(function.low, function.high):
            target = branch_target(self.text[at], at)
            if target is None or target > at or target < function.low or target not in self.counts.executions:
                continue
            times = self.counts.executions[at]
            passed = self.counts.executions.get(at + 4, 0) if is_conditional(self.text[at]) else 0
            if passed <= 0.67 * times:  # otherwise the branch is taken in less than a third of its executions
                heads[target] = max(at, heads.get(target, at))
        stack = [function]
        for low, high in sorted(heads.items(), key=lambda loop: (loop[0], -loop[1])):
            while stack[-1].high < low:
                stack.pop()
            if high > stack[-1].high:
                continue  # overlaps the loop around it: its instructions stay there
            loop = Region(low, high, self.counts.executions[low], f"{function.name} loop {low:x}")
            stack[-1].children.append(loop)
            stack.append(loop)
        return function

    def _expanded(self, region: Region) -> list[int] | None:
        """Return the addresses of an iteration with inner loops unrolled; None if they are too many."""
        body: list[int] = []
        children = iter(sorted(region.children, key=lambda child: child.low))
        child = next(children, None)
        for at in self._span(region.low, region.high):
            while child is not None and at > child.high:
                child = next(children, None)
            if child is not None and at >= child.low:
                if at == child.low:
                    inner = self._expanded(child)
                    times = round(child.iterations / region.iterations)
                    if inner is None or len(inner) * times > MAX_BODY:
                        return None
                    body += inner * times
            elif self.counts.executions[at] >= 0.5 * region.iterations:
                body.append(at)
        return body if len(body) <= MAX_BODY else None

    def _shares(self, region: Region, cpus: tuple[str, ...]) -> Iterator[Share]:
        everything = self._span(region.low, region.high)
        executed = self._executed(everything)
        if executed < MIN_SHARE * self.counts.total:
            yield Share(region.name, executed, region.iterations, {}, Counter())
            return
        body = self._expanded(region)
        if body:
            yield self._share(region, body, everything, cpus)
            return
        for child in region.children:
            yield from self._shares(child, cpus)
        own = self._own(region)
        if not own:
            return
        # The instructions have different counts: the modeled loop runs the median number of iterations.
        times = sorted(self.counts.executions[at] for at in own)[len(own) // 2]
        rest = Region(region.low, region.high, max(1, times), f"{region.name} rest")
        body = [at for at in own if self.counts.executions[at] >= 0.5 * rest.iterations]
        yield self._share(rest, body[:MAX_BODY], own, cpus)

    def _share(self, region: Region, body: list[int], addresses: list[int], cpus: tuple[str, ...]) -> Share:
        executed = self._executed(addresses)
        texts = [self.text[at] for at in body]
        kinds: Counter[str] = Counter()
        for at in addresses:
            kinds[kind(self.text[at])] += self.counts.executions[at]
        cycles: dict[str, float] = {}
        if executed >= MIN_SHARE * self.counts.total:
            cycles = {cpu: self.mca.cycles(texts, cpu) / len(texts) * executed for cpu in cpus}
        return Share(region.name, executed, region.iterations, cycles, kinds)
