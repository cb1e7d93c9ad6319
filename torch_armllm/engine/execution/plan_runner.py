"""Runs the steps of an engine: moves blocks of the cache, then computes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from torch_armllm.engine.execution.computed import StepResult
from torch_armllm.engine.execution.fused_head import FusedHead
from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.execution.thread_team import ThreadTeam
from torch_armllm.engine.step import Step
from torch_armllm.engine.trace import NO_TRACE, Trace
from torch_armllm.kv_cache.shapes import Cache
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.servable_model import ServableModel


class PlanRunner:
    """The tensors of an engine, and the plan that works on them.

    The system gives memory to a block when it is first written, so that blocks never used cost nothing.

    Args:
        model: see `ServableModel`.
        num_blocks: of keys and values.
        swap_blocks: more of them, for sequences that wait for their turn.
        trace: takes notes of what a step spends its time on.
        team: the threads that compute; None: those that torch has.
        drawable: how many token ids may be drawn; None: all.
    """

    def __init__(
        self,
        model: ServableModel,
        num_blocks: int,
        swap_blocks: int = 0,
        trace: Trace = NO_TRACE,
        team: ThreadTeam | None = None,
        drawable: int | None = None,
    ) -> None:
        self.model = model
        self.plan = model.plan
        self.head = model.head
        self.shape = model.shape
        self.block_size = model.shape.block_size
        self.vocab_size = model.vocab_size
        self.num_blocks = num_blocks
        self.swap_blocks = swap_blocks
        self.cache: Cache = self.shape.tensors(num_blocks)
        self._swap: Cache | None = self.shape.tensors(swap_blocks) if swap_blocks else None
        self._builder = StepBuilder(self.cache, self.block_size, model.first_position)
        self._drawable = model.vocab_size if drawable is None else drawable
        self._joined: FusedHead | None = None
        self._may_join = True
        self._trace = trace
        self._at_work = nullcontext() if team is None else team.at_work()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache, swap memory not included."""
        return sum(tensor.nbytes for tensor in self.cache if tensor is not None)

    def execute(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits ``(R, vocab_size)`` in the model's type: the rows of every `Scheduled.wanted`, in the order
            of ``step.scheduled``.
        """
        return self.compute(step).logits

    def compute(self, step: Step, best: bool = False) -> StepResult:
        """Computes a step; see `execute`.

        Args:
            step: what to compute.
            best: whether the most probable tokens are of use; they are found where that costs little.
        """
        with self._at_work:
            return self._compute(step, best)

    def _compute(self, step: Step, best: bool) -> StepResult:
        self.move(step)
        if step.decodes and best and self._joined is not None:
            inputs = self._builder.decode(step)
            self._trace.mark("prepare")
            computed = self._joined.run(inputs)
            self._trace.mark("decode")
            return computed
        inputs, rows = self._builder.build(step)
        self._trace.mark("prepare")
        decodes = len(rows) == inputs.tokens
        with torch.no_grad():
            hidden = self.plan.run(inputs)
            self._trace.mark("decode" if decodes else "prefill")
            if not decodes:
                hidden = hidden[torch.tensor(rows, dtype=torch.int64)]
            logits = self.head(hidden) if rows else hidden.new_empty(0, self.vocab_size)
            self._trace.mark("head")
            if step.decodes and best and self._may_join:
                self._join(hidden)
        return StepResult(logits)

    def _join(self, hidden: Tensor) -> None:
        """Joins the head to a native plan, if it is nothing but a product."""
        self._may_join = False
        if not isinstance(self.plan, NativePlan):
            return
        weights = self.head.weights(hidden)
        if weights is not None:
            self._joined = FusedHead(self.plan, weights, self._drawable)

    def move(self, step: Step) -> None:
        """Copies the blocks that a step swaps out, swaps in, and makes a sequence's own."""
        if step.swaps_out:
            assert self._swap is not None
            _copy(self.cache, self._swap, step.swaps_out)
        if step.swaps_in:
            assert self._swap is not None
            _copy(self._swap, self.cache, step.swaps_in)
        if step.copies:
            _copy(self.cache, self.cache, step.copies)


def _copy(source: Cache, target: Cache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks of all layers."""
    origins, places = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    for old, new in zip(source, target, strict=True):
        if old is not None and new is not None:
            new.index_copy_(1, places, old.index_select(1, origins))
