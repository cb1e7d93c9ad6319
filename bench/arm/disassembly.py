"""Disassembly of opcodes, with the kind and the branch target of each instruction."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache

NEWEST, OLDEST = 22, 17
"""Versions of LLVM: 17 is the first with models of all the cores."""
PREFERRED = 19
"""The version that Debian 12 and 13 offer, so that figures of different machines compare."""


def version(program: str) -> int:
    """Return the major version of an LLVM program; 0 if it prints none."""
    printed = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"LLVM version (\d+)", printed)
    return int(match[1]) if match else 0


@cache
def tool(name: str) -> str:
    """Return the name under which an LLVM tool of a version that knows all the cores is installed.

    Raises:
        RuntimeError: the tool is missing, or only an older version is installed.
    """
    versions = [PREFERRED, *(v for v in range(NEWEST, OLDEST - 1, -1) if v != PREFERRED)]
    too_old = []
    for candidate in (*(f"{name}-{v}" for v in versions), name):
        if shutil.which(candidate) is None:
            continue
        if (installed := version(candidate)) >= OLDEST:
            return candidate
        too_old.append(f"{candidate} is version {installed}")
    reason = f" ({', '.join(too_old)})" if too_old else ""
    raise RuntimeError(f"no {name} of LLVM {OLDEST} or later{reason}; run bench/arm/setup.sh")


def disassemble(opcodes: Iterable[int]) -> dict[int, str]:
    """Return the text of each opcode; opcodes that LLVM does not know become ``.inst``."""
    words = sorted(set(opcodes))
    source = "".join("".join(f"0x{b:02x} " for b in w.to_bytes(4, "little")) + "\n" for w in words)
    run = subprocess.run(
        [tool("llvm-mc"), "--disassemble", "-triple=aarch64", "-mattr=+all"],
        input=source,
        capture_output=True,
        text=True,
    )
    invalid = {int(line) for line in re.findall(r"<stdin>:(\d+):\d+: warning: invalid", run.stderr)}
    lines = (line.split("//")[0].strip() for line in run.stdout.splitlines())
    texts = iter([line for line in lines if line and not line.startswith(".text")])
    return {w: f".inst 0x{w:08x}" if i + 1 in invalid else next(texts) for i, w in enumerate(words)}


_BRANCH = re.compile(r"(b\.\w+|b|cbn?z|tbn?z)\s+(?:.*,\s*)?#(-?\d+)$")


def branch_target(text: str, address: int) -> int | None:
    """Return the target of a direct branch that is no call; None for other instructions."""
    match = _BRANCH.match(text)
    return address + int(match[2]) if match else None


def is_conditional(text: str) -> bool:
    return not re.match(r"b\s", text)


_KINDS = (
    ("smmla", r"\w*mmla\b"),
    ("mopa", r"\w*mop[as]\b"),
    ("dot", r"\w*dot\b"),
    ("fma", r"f(n?m(add|sub)|ml[as]\w*|mad|msb)\b"),
    ("convert", r"([su]cvtf|bf?cvt\w*|fcvt\w*)\b"),
    ("load.vec", r"ld\w+\s+(\{|[qdszhb]\d)"),
    ("load", r"ld|prf"),
    ("store", r"st[rplu1-4n]"),
    ("branch", r"(b|bl|br|blr|ret|b\.\w+|[ct]bn?z)\b(?!fx)"),
    ("vector", r"\w+\s+(\{\s*)?([vqz]\d|p\d|za|[sdhb]\d)"),
)


def kind(text: str) -> str:
    """Return the coarse class of an instruction, for a first look at a profile."""
    for name, pattern in _KINDS:
        if re.match(pattern, text):
            return name
    return "integer"


def neutral(text: str) -> str:
    """Rewrite an instruction for llvm-mca: branches have no target; calls (100 cycles there) become jumps."""
    if re.match(r"(b|bl|ret)\b(?!\.)", text):
        return "b ."
    if text.startswith("blr"):
        return "br" + text[3:]
    return re.sub(r"^(b\.\w+\s+|cbn?z\s+\w+,\s*|tbn?z\s+\w+,\s*#\d+,\s*)#?-?\d+$", r"\1.", text)
