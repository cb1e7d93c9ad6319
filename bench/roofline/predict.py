"""The roofline: each part of a step takes the longer of its memory time and its compute time."""

from __future__ import annotations

from dataclasses import dataclass

from bench.roofline.figures import Figures
from bench.roofline.machines import BARRIER_US, SHARE, Machine
from bench.roofline.models import Attention, Experts, Model, Part, Product, Recurrence


@dataclass(frozen=True)
class Work:
    """One step.

    Attributes:
        tokens: of the step, of all sequences together.
        context: positions before it, of each sequence.
        sequences: 1 for a prompt; as many as there are tokens for decoding.
    """

    tokens: int
    context: int
    sequences: int

    @property
    def decodes(self) -> bool:
        """One token a sequence."""
        return self.tokens == self.sequences


@dataclass(frozen=True)
class Prediction:
    """A step's seconds by bottleneck; ``tok_s`` counts all sequences together."""

    tokens: int
    memory_s: float
    compute_s: float
    barriers_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.memory_s + self.compute_s + self.barriers_s

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


_PHASES = {Product: 2, Experts: 6, Attention: 3, Recurrence: 4}
_ROW_PHASES = 3
"""Phases of a layer: norms with their residuals, rotations and writing of keys."""


def predict(
    model: Model, machine: Machine, work: Work, figures: Figures, threads: int | None = None
) -> Prediction:
    """Predict the seconds of a step on a number of cores of a machine, by default all.

    Instructions of row ops (norms, rotations, the activation) are left out: under 3 % of a step's cycles.
    """
    cores = threads or machine.cores
    rate = cores * machine.ghz * 1e9
    bandwidth = 1e9 * min(SHARE * machine.gb_s, cores * machine.core_gb_s)
    memory = compute = 0.0
    phases = _ROW_PHASES * model.depth
    for count, part in model.parts():
        phases += count * _PHASES[type(part)]
        bytes_read, cycles = _cost(part, work, figures, machine)
        by_memory, by_compute = bytes_read / bandwidth, cycles / rate
        if by_memory > by_compute:
            memory += count * by_memory
        else:
            compute += count * by_compute
    barriers = phases * BARRIER_US * 1e-6 * min(1.0, cores / machine.cores)
    return Prediction(work.tokens, memory, compute, barriers)


def _cost(part: Part, work: Work, figures: Figures, machine: Machine) -> tuple[float, float]:
    """Return the bytes of memory and the cycles of one core."""
    core = (machine.core, machine.variant)
    if isinstance(part, Attention):
        return _attention(part, work, figures, machine)
    if isinstance(part, Recurrence):
        cycles = work.tokens * part.elements * figures.state(machine.core, work.decodes)
        return work.sequences * part.bytes_a_step, cycles
    if isinstance(part, Product):
        tokens = work.sequences if part.last_token_only else work.tokens
        macs = tokens * part.rows * part.columns
        return part.bytes, macs / figures.product(*core, tokens, part.int8)
    touched = part.touched(work.tokens)
    rows = work.tokens * part.top_k / touched
    macs = sum(matrix.rows * matrix.columns for matrix in part.matrices) * work.tokens * part.top_k
    return touched * sum(matrix.bytes for matrix in part.matrices), macs / figures.product(*core, rows)


def _attention(part: Attention, work: Work, figures: Figures, machine: Machine) -> tuple[float, float]:
    own = work.tokens // work.sequences
    seen = work.context + (own + 1) / 2  # on average, as a token sees those before it
    held = work.context + own
    if part.window is not None:
        seen, held = min(seen, part.window), min(held, part.window + own)
    macs = work.tokens * seen * part.heads * (part.key + part.value)
    rate = figures.attention(machine.core, machine.variant, part.latent, work.decodes)
    return work.sequences * held * part.bytes_a_token, macs / rate
