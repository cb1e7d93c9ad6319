"""Target: damaged programs of plans, and damaged inputs of their steps, between guard pages.

`plan_create` refuses a program, or the plan runs within its memory; a step refuses inputs, or runs within
them.  A valid program with valid inputs runs.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.ops.arguments import Spec, build
from tests.fuzz.ops.calls.every_op import variants
from tests.fuzz.ops.memory import GuardedMemory, Region
from tests.fuzz.ops.mutations import INTEGERS, REALS, mutate_tensor
from tests.fuzz.ops.recorded import VOCABULARY, Recorded, head, models, pieces
from tests.fuzz.ops.recorded import step_inputs as draw_inputs
from tests.fuzz.ops.target import Finding, check_message
from torch_armllm.plan import native
from torch_armllm.plan.placed_program import PlacedProgram

_EXPECTED = (RuntimeError, ValueError, TypeError)
_MOST_MEMORY = 3 << 30
"""Bytes that a call may take: a program may ask for any size of the arena."""
_armllm = torch.ops.armllm


@cache
def _memory() -> GuardedMemory:
    return GuardedMemory()


@cache
def _used() -> int:
    """Bytes of the process's addresses, before its first call."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Bounds the process's memory while a call runs."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_used() + _MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _damaged_integers(integers: list[int], draw: Random) -> list[int]:
    """Changes a few of a program's integers, or moves some."""
    integers = list(integers)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(integers))
        kind, value = draw.random(), integers[at]
        if kind < 0.45:
            integers[at] = draw.choice(
                (value - 1, value + 1, value + 16, 2 * value, -value, value + 64, value // 2)
            )
        elif kind < 0.65:
            integers[at] = draw.choice(integers)
        elif kind < 0.88:
            integers[at] = draw.choice(INTEGERS)
        elif kind < 0.92:
            del integers[at]
        elif kind < 0.95:
            integers.insert(at, draw.choice(INTEGERS))
        elif kind < 0.97:
            del integers[at:]
        else:
            other = draw.randrange(len(integers))
            integers[at], integers[other] = integers[other], integers[at]
        if not integers:
            break
    return integers


def _damaged_constants(constants: list[Tensor], draw: Random) -> list[Tensor]:
    """Shrinks, exchanges or drops a constant."""
    constants = list(constants)
    at, kind = draw.randrange(len(constants)), draw.random()
    tensor = constants[at]
    if kind < 0.4 and tensor.dim() and tensor.shape[0] > 1:
        constants[at] = tensor[: draw.randrange(tensor.shape[0])]
    elif kind < 0.6:
        constants[at] = draw.choice(constants)
    elif kind < 0.8:
        constants[at] = tensor.to(draw.choice((torch.float32, torch.bfloat16, torch.int32, torch.uint8)))
    else:
        del constants[at]
    return constants


def _damaged(program: PlacedProgram, draw: Random) -> tuple[list[Tensor], list[int], list[float], str]:
    """Returns arguments of `plan_create`, and the kind of damage."""
    constants, integers, floats = program.encode()
    kind = draw.choices(("program", "constants", "floats", "nothing"), (50, 6, 4, 40))[0]
    if kind == "program":
        integers = _damaged_integers(integers, draw)
    elif kind == "constants":
        constants = _damaged_constants(constants, draw)
    elif kind == "floats" and floats:
        floats = [draw.choice(REALS) if draw.random() < 0.3 else value for value in floats]
        floats = floats[: draw.choice((len(floats), len(floats), draw.randrange(len(floats))))]
    return constants, integers, floats, kind


def _damage_inputs(inputs: dict[str, Any], draw: Random) -> bool:
    """Changes a few inputs; returns True if it did."""
    count = draw.choices((0, 1, 2), (40, 50, 10))[0]
    for _ in range(count):
        name = draw.choice(list(inputs))
        if isinstance(inputs[name], Spec):
            inputs[name] = mutate_tensor(inputs[name], draw)[1]
    if draw.random() < 0.03:
        del inputs[draw.choice(list(inputs))]
        return True
    return count > 0


def run(seed: int) -> None:
    """Creates and runs a plan.

    Raises:
        Finding: the step wrote to other memory, or an error says too little, or valid arguments are refused.
        Exception: an error of another family.
    """
    draw = Random(seed * 2654435761 & (1 << 62) - 1)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    recorded = draw.choice((*models(), pieces()))
    _armllm.isa_select(draw.choice(variants()))
    constants, integers, floats, kind = _damaged(recorded.program, draw)
    inputs, tokens = draw_inputs(recorded, draw)
    valid = not _damage_inputs(inputs, draw) and kind == "nothing"
    if draw.random() < 0.04:
        tokens, valid = draw.choice((tokens + 1, tokens - 1, *INTEGERS)), False
    step = _Step(recorded, inputs, tokens, draw)
    with _limited_memory():
        try:
            plan = _armllm.plan_create(constants, integers, floats)
        except _EXPECTED as error:
            check_message(error)
            if kind == "nothing":
                raise Finding(f"{recorded.name}: a valid program is refused: {error}") from error
            return
        try:
            step.run(plan, kind == "nothing")
        except _EXPECTED as error:
            if valid:
                raise Finding(f"{recorded.name}: valid inputs are refused: {error}") from error
            check_message(error)
        except Finding as found:
            raise Finding(f"{recorded.name}, {kind}: {found}; {tokens} tokens of {inputs}") from found
        finally:
            _armllm.plan_free(plan)
    step.check(kind)


class _Step:
    """Inputs of one step in guarded memory."""

    def __init__(self, recorded: Recorded, inputs: dict[str, Any], tokens: int, draw: Random) -> None:
        self.draw, self.recorded, self.tokens = draw, recorded, tokens
        memory = _memory()
        memory.clear()
        self.tensors: list[Any] = []
        self.regions: dict[str, Region] = {}
        for name, spec in inputs.items():
            if isinstance(spec, Spec):
                spec.at_end = draw.random() < 0.7
            try:
                value, region = build(spec, memory, draw) if isinstance(spec, Spec) else (spec, None)
            except OverflowError:
                value, region = torch.empty(0), None
            self.tensors.append(value)
            if region is not None:
                self.regions[name] = region
        self.before = {name: region.inside() for name, region in self.regions.items()}
        self.beside = {name: region.outside() for name, region in self.regions.items()}
        self.memory = memory

    def run(self, plan: int, is_whole: bool) -> None:
        """Runs the plan in one of the ways that there are."""
        way = self.draw.random()
        if way < 0.7 or self.recorded.shape is None:
            _armllm.plan_run(plan, self.tensors, self.tokens)
        elif way < 0.75:
            _armllm.plan_profile(plan, self.tensors, self.tokens)
        else:
            self._run_then(plan, is_whole)

    def _run_then(self, plan: int, is_whole: bool) -> None:
        """Runs an output layer on the results, then repeats the step on other values."""
        program = self.recorded.program
        following = head(program.columns, program.dtype).program
        other = _armllm.plan_create(*following.encode())
        try:
            rows = self.tokens if 0 < self.tokens < 64 else 1
            shapes = ((rows, VOCABULARY), program.dtype), ((rows, 1), torch.int64)
            tensors = []
            for number, (shape, dtype) in enumerate(shapes):
                tensor, region = build(Spec(shape, dtype), self.memory, self.draw)
                tensors.append(tensor)
                if region is not None:
                    self.regions[f"result{number}"] = region
                    self.beside[f"result{number}"] = region.outside()
            binding = _armllm.plan_run_then(plan, other, self.tensors, tensors, self.tokens)
            if is_whole:
                self._change_values()
            native._entry()(plan, other, binding, None)
        finally:
            _armllm.plan_free(other)

    def _change_values(self) -> None:
        """Writes another number to some inputs, which a replay then reads."""
        for tensor in self.tensors[:6]:
            if self.draw.random() < 0.3 and isinstance(tensor, Tensor) and tensor.numel():
                value = torch.tensor(self.draw.choice((0, 1, 2, 3, 40, 200, -9, 2**30)))
                at = tuple(self.draw.randrange(size) for size in tensor.shape)
                tensor[at] = value.to(tensor.dtype)  # int8 wraps: an error would leave ``before`` as it was
        self.before = {name: self.regions[name].inside() for name in self.before}

    def check(self, kind: str) -> None:
        """Raises a finding if anything but the cache was written."""
        for name, region in self.regions.items():
            if region.outside() != self.beside[name]:
                raise Finding(f"{self.recorded.name}, {kind}: memory beside {name} was written")
            if name in self.before and not name.startswith("cache") and region.inside() != self.before[name]:
                raise Finding(f"{self.recorded.name}, {kind}: {name} was changed")
