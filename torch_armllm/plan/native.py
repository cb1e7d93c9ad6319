"""Plans that run in C++."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from torch_armllm.ops import LIBRARY
from torch_armllm.plan.expert_store import ExpertStore
from torch_armllm.plan.placed_program import PlacedProgram
from torch_armllm.plan.step import Plan, StepInputs
from torch_armllm.system.forks import prepare_for_forks


class NativePlan:
    """A plan that C++ runs as a whole, from the first to the last instruction of a step.

    Args:
        program: instructions and constants.
        experts: the store of those constants that are on disk; None: all are in memory.
    """

    def __init__(self, program: PlacedProgram, experts: ExpertStore | None = None) -> None:
        prepare_for_forks()
        self.program = program
        self.experts = experts
        self.instructions = len(program.instructions)
        self.opcodes = program.opcodes
        self._handle = torch.ops.armllm.plan_create(*program.encode())
        self._run = torch.ops.armllm.plan_run.default
        self._run_then = torch.ops.armllm.plan_run_then.default
        weakref.finalize(self, _free(), self._handle)

    def run(self, inputs: StepInputs) -> Tensor:
        """See `Plan.run`."""
        out: Tensor = self._run(self._handle, _tensors(inputs), inputs.tokens)[0]
        return out

    def run_then(self, following: NativePlan, inputs: StepInputs, results: list[Tensor]) -> int:
        """Runs a step, then another plan on its results.

        Args:
            following: the other plan.
            inputs: inputs of the step.
            results: tensors that the other plan's results are written to.

        Returns:
            A binding id for `replay`.
        """
        binding: int = self._run_then(
            self._handle, following._handle, _tensors(inputs), results, inputs.tokens
        )
        return binding

    def replay(self, following: NativePlan) -> Callable[[int, int | None], bool]:
        """Returns a function that replays a `run_then` on the same memory with new values in it.

        Both plans, and the tensors of that call, must be alive whenever it is called.

        Args:
            following: the other plan.

        Returns:
            A function of two arguments: the binding id that `run_then` returned, and the address of a table
            for the times of both plans' instructions, laid out as in `profile`, or None. It returns False and
            does nothing if either plan has run another step since, or if the values or torch's threads need
            another binding.
        """
        return functools.partial(_entry(), self._handle, following._handle)

    def profile(self, inputs: StepInputs) -> Tensor:
        """Runs a step and times it.

        Returns:
            int64 ``(instructions + 2, 3)``, nanoseconds.  A row of an instruction has its duration, the
            computing time summed over the threads, and the time since the previous instruction.  In the last
            two rows the first column has the time before the first instruction and after the last.  Their
            second column has the monotonic clock at the beginning and at the end.
        """
        times: Tensor = torch.ops.armllm.plan_profile(self._handle, _tensors(inputs), inputs.tokens)
        return times


def native_plan(plan: Plan | None) -> NativePlan | None:
    """Returns a plan if C++ runs it; None if a graph runs node by node, or if there is no plan."""
    return plan if isinstance(plan, NativePlan) else None


@functools.cache
def _entry() -> Callable[[int, int, int, int | None], bool]:
    replay = LIBRARY.armllm_plan_replay
    replay.argtypes, replay.restype = (*(ctypes.c_int64,) * 3, ctypes.c_void_p), ctypes.c_bool
    return replay


@functools.cache
def _free() -> Callable[[int], None]:
    """Returns the function that frees a plan; the op would be recorded by a trace that is under way."""
    free = LIBRARY.armllm_plan_free
    free.argtypes, free.restype = (ctypes.c_int64,), None
    return free


def _tensors(i: StepInputs) -> list[Tensor]:
    """Returns the inputs in the order in which programs number them."""
    given = [tensor for tensor in (i.given, i.numbers, i.rows, *i.angles) if tensor is not None]
    return [i.input_ids, i.position_ids, i.slots, i.block_table, i.query_start, i.seq_lens, *i.caches, *given]
