"""Exact counts of the instructions that an emulated program executes between two marks."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

START, STOP = 0xD5032E1F, 0xD5032E3F  # hint #112, hint #113: no-ops on every Arm CPU

# The machine of each emulated run: QEMU's -cpu, and the length of a scalable vector in bits.
CPUS = {
    "cortex-a72": ("cortex-a72", 128),
    "neoverse-n1": ("neoverse-n1", 128),
    "i8mm": ("max,sve=off", 128),
    "sve128": ("max,sve128=on", 128),
    "sve256": ("max,sve256=on", 256),
    "sve512": ("max,sve512=on", 512),
    "sme2": ("max,sve128=on,sme512=on,sme-default-vector-length=64", 128),
}


@dataclass
class Counts:
    """Number of executions and opcode of every instruction, by address."""

    executions: dict[int, int] = field(default_factory=dict)
    opcodes: dict[int, int] = field(default_factory=dict)

    def add(self, address: int, times: int, opcodes: Iterable[int]) -> None:
        for i, opcode in enumerate(opcodes):
            at = address + 4 * i
            self.executions[at] = self.executions.get(at, 0) + times
            self.opcodes[at] = opcode

    @property
    def total(self) -> int:
        return sum(self.executions.values())


def parse_blocks(lines: Iterable[str]) -> Counts:
    """Parses the output of ``tbcount.c``: ``T address executions opcode…``; blocks may overlap."""
    counts = Counts()
    for line in lines:
        kind, address, times, *opcodes = line.split()
        if kind != "T":
            raise ValueError(f"not a line of tbcount: {line!r}")
        counts.add(int(address, 16), int(times), (int(opcode, 16) for opcode in opcodes))
    return counts


_INSTRUCTION = re.compile(r"0x([0-9a-f]+):\s+([0-9a-f]{8})\b")


def parse_log(lines: Iterable[str]) -> Counts:
    """Parses a ``qemu -d in_asm,exec,nochain`` log: slower than the plugin, but every QEMU writes it."""
    blocks: dict[int, list[int]] = {}
    times: dict[int, int] = {}
    new: list[int] = []
    counting = False
    for line in lines:
        if line.startswith("Trace "):
            new = []
            address = int(line.split("/", 2)[1], 16)
            if counting:
                times[address] = times.get(address, 0) + 1
            block = blocks.get(address, ())
            counting = (counting or START in block) and STOP not in block
        elif line.startswith("IN:"):
            new = []
        elif match := _INSTRUCTION.match(line):
            if not new:
                blocks[int(match[1], 16)] = new
            new.append(int(match[2], 16))
    counts = Counts()
    for address, n in times.items():
        counts.add(address, n, blocks[address])
    return counts


class Emulator:
    """Runs programs under QEMU and counts: by the plugin if QEMU can load it, else from the log."""

    def __init__(self, qemu: str, plugin: Path | None) -> None:
        self.qemu, self.plugin = qemu, plugin

    def count(self, cpu: str, command: list[str]) -> tuple[Counts, dict[str, float]]:
        """Returns the counts and the program's ``name=number`` output; raises RuntimeError if it fails."""
        start = [self.qemu, "-cpu", CPUS[cpu][0]]
        with tempfile.TemporaryDirectory() as folder:
            blocks = Path(folder, "blocks")
            if self.plugin is not None:
                start += ["-plugin", f"{self.plugin},out={blocks}"]
                done = subprocess.run(start + command, capture_output=True, text=True)
                output, errors, status = done.stdout, done.stderr, done.returncode
                counts = parse_blocks(blocks.read_text().splitlines()) if blocks.exists() else Counts()
            else:
                counts, output, errors, status = self._from_log(
                    start + ["-d", "in_asm,exec,nochain"], command
                )
        if status != 0:
            raise RuntimeError(errors.strip()[-500:] or f"status {status}")
        if not counts.executions:
            raise RuntimeError("nothing ran between the marks")
        work = dict(part.split("=") for part in output.split())
        return counts, {name: float(value) for name, value in work.items()}

    @staticmethod
    def _from_log(start: list[str], command: list[str]) -> tuple[Counts, str, str, int]:
        other: list[str] = []

        def log(lines: Iterable[str]) -> Iterator[str]:
            for line in lines:
                if line.startswith(("Trace ", "IN:", "0x")):
                    yield line
                elif len(line) > 1 and not line.startswith(("---", "Linking", "Stopped", "cpu_io")):
                    other.append(line)

        with subprocess.Popen(
            start + command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            assert run.stdout is not None and run.stderr is not None
            counts = parse_log(log(run.stderr))
            output = run.stdout.read()
        return counts, output, "".join(other), run.returncode


def has_plugins(qemu: str) -> bool:
    """Return True if this QEMU was built with TCG plugins."""
    help_text = subprocess.run([qemu, "-help"], capture_output=True, text=True)
    return "-plugin" in help_text.stdout


def symbols(program: Path, environment: Mapping[str, str] = os.environ) -> list[tuple[int, str]]:
    """Returns the start and demangled name of every function of a static program, by address."""
    nm = environment.get("NM", "aarch64-linux-gnu-nm")
    listing = subprocess.run(
        [nm, "-n", "-C", "--defined-only", str(program)], capture_output=True, text=True, check=True
    )
    functions = []
    for line in listing.stdout.splitlines():
        address, kind, name = line.split(" ", 2)
        if kind in "tTwWiVv" and not name.startswith("$"):
            functions.append((int(address, 16), name))
    return functions
