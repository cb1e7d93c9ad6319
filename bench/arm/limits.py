"""Least cycles of an op by the model of a core: its loads, stores and multiply-adds alone.

The instructions are those of NEON: loads and stores of two registers of 16 bytes, and multiply-adds of four
float32 lanes.  None waits for another, and they are spread evenly, so that the ports of the core are all that
limits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.arm.model import Mca

ELEMENTS = 128
"""Elements of the modeled body."""
PAIR_BYTES, LANES = 32, 4
ACCUMULATORS = 24
"""Registers that the multiply-adds go through in turn: more than the latency times the ports of any core."""


@dataclass(frozen=True)
class Work:
    """Work that an element cannot do without."""

    loaded: float
    """Bytes."""
    stored: float
    """Bytes."""
    multiply_adds: float
    """In float32; a lone multiply counts as one."""


def instructions(work: Work) -> list[str]:
    """Return the instructions that ``ELEMENTS`` elements need, evenly spread."""
    placed = [
        *_spread("ldp q{0}, q{1}, [x0]", (24, 26), work.loaded * ELEMENTS / PAIR_BYTES),
        *_spread("fmla v{0}.4s, v30.4s, v31.4s", range(ACCUMULATORS), work.multiply_adds * ELEMENTS / LANES),
        *_spread("stp q{0}, q{1}, [x1]", (28,), work.stored * ELEMENTS / PAIR_BYTES),
    ]
    return [text for _, text in sorted(placed)]


def _spread(form: str, registers: Sequence[int], count: float) -> Iterator[tuple[float, str]]:
    """Yield instructions, each with its place between 0 and 1."""
    whole = round(count)
    for i in range(whole):
        first = registers[i % len(registers)]
        yield (i + 0.5) / whole, form.format(first, first + 1)


def cycles_per_element(work: Work, core: str, mca: Mca) -> float:
    """Return the least cycles that an element of ``work`` takes on ``core``."""
    return mca.cycles(instructions(work), core) / ELEMENTS
