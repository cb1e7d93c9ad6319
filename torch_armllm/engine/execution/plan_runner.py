"""Computes the steps of an engine with a plan: block copies, hidden states, logits."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from torch_armllm.engine.execution.adapter_rows import AdapterRows
from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.execution.thread_team import ThreadTeam
from torch_armllm.engine.pictures.picture_steps import PictureSteps
from torch_armllm.engine.step import StateMove, Step
from torch_armllm.engine.trace import NO_TRACE, Trace
from torch_armllm.kv_cache.block_copies import copy_blocks
from torch_armllm.kv_cache.shapes import Cache, Shape
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import Plan
from torch_armllm.plan.step_result import StepResult


class PlanRunner:
    """Owns the KV cache of an engine and runs its plan.

    The system maps memory at the first write, so unused blocks cost nothing.

    Args:
        model: see `ServableModel`.
        num_blocks: blocks of the KV cache.
        swap_blocks: blocks of swap memory.
        state_slots: slots for the states of recurrent layers.
        swap_state_slots: likewise, of swap memory.
        shape: of the KV cache and the states; None: the model's own.
        trace: records the phases of steps.
        team: compute threads; None: torch's own.
        drawable: number of token ids that may be sampled; None: all.
        kept_columns: columns of the plan's results that a drafter reads; None: there is no such drafter.
        adapters: the adapters of a step's rows; None: the plan has no slots for adapters.
        pictures: what pictures change in steps; None: there are no pictures.
    """

    def __init__(
        self,
        model: ServableModel,
        num_blocks: int,
        swap_blocks: int = 0,
        trace: Trace = NO_TRACE,
        team: ThreadTeam | None = None,
        drawable: int | None = None,
        state_slots: int = 0,
        swap_state_slots: int = 0,
        shape: Shape | None = None,
        kept_columns: range | None = None,
        adapters: AdapterRows | None = None,
        pictures: PictureSteps | None = None,
    ) -> None:
        self.model = model
        self.plan: Plan = model.plan if pictures is None else pictures.plan
        self.head = model.head
        self.shape = model.shape if shape is None else shape
        self.block_size = self.shape.block_size
        self.vocab_size = model.vocab_size
        self.num_blocks = num_blocks
        self.swap_blocks = swap_blocks
        self.cache: Cache = self.shape.tensors(num_blocks)
        self._swap: Cache | None = self.shape.tensors(swap_blocks) if swap_blocks else None
        self.states = self.shape.states.tensors(state_slots)
        self._swapped_states = self.shape.states.tensors(swap_state_slots)
        self._builder = StepBuilder(
            *(self.cache, self.block_size, model.first_position, self.states),
            *((None, None) if pictures is None else (pictures.spare, pictures.numbers)),
        )
        self._drawable = model.vocab_size if drawable is None else drawable
        self._kept = kept_columns
        # further columns follow those of the last hidden state
        self._hidden_size = (kept_columns.start or None) if kept_columns else None
        self._fused_head: FusedHead | None = None
        self._may_fuse = True
        self._adapters = adapters
        self._trace = trace
        self._at_work = nullcontext() if team is None else team.at_work()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache and the states, swap memory not included."""
        return sum(tensor.nbytes for tensor in (*self.cache, *self.states) if tensor is not None)

    def execute(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits ``(R, vocab_size)`` in the model's dtype: the rows of every `Scheduled.logit_positions`, in
            the order of ``step.scheduled``.
        """
        return self.compute(step).logits

    def compute(self, step: Step, best: bool = False) -> StepResult:
        """Computes a step; see `execute`.

        Args:
            step: to compute.
            best: asks for the most probable tokens too; they are returned if they cost little.
        """
        with self._at_work, nullcontext() if self._adapters is None else self._adapters.of(step):
            return self._compute(step, best)

    def _compute(self, step: Step, best: bool) -> StepResult:
        self.copy_blocks(step)
        if step.decode_only and best and self._fused_head is not None:
            inputs = self._builder.decode(step)
            self._trace.mark("prepare")
            computed = self._fused_head.run(inputs)
            self._trace.mark("decode")
            return computed
        inputs, rows = self._builder.build(step)
        self._trace.mark("prepare")
        all_logits = len(rows) == inputs.tokens
        if all_logits and best and self._fused_head is not None:
            computed = self._fused_head.run(inputs)
            self._trace.mark("decode")
            return computed
        with torch.no_grad():
            hidden = self.plan.run(inputs)
            self._trace.mark("decode" if all_logits else "prefill")
            kept = None if self._kept is None else hidden[:, self._kept.start : self._kept.stop]
            if self._hidden_size is not None:
                hidden = hidden[:, : self._hidden_size].contiguous()
            if not all_logits:
                hidden = hidden[torch.tensor(rows, dtype=torch.int64)]
            logits = self.head(hidden) if rows else hidden.new_empty(0, self.vocab_size)
            self._trace.mark("head")
            if all_logits and best and self._may_fuse:
                self._fuse_head(hidden)
        return StepResult(logits, hidden=kept)

    def rows_are_exact(self) -> bool:
        """True if a token's logits are known to have the same bits whatever else a step computes."""
        if not isinstance(self.plan, NativePlan):
            return False
        like = torch.zeros(1, self.plan.program.columns, dtype=self.plan.program.dtype)
        return self.head.weights(like) is not None

    def _fuse_head(self, hidden: Tensor) -> None:
        """Fuses the head with a native plan, if the head is one matrix product."""
        self._may_fuse = False
        if not isinstance(self.plan, NativePlan):
            return
        weights = self.head.weights(hidden)
        if weights is not None:
            columns = self._hidden_size, self._kept
            self._fused_head = FusedHead(self.plan, weights, self._drawable, *columns)

    def copy_blocks(self, step: Step) -> None:
        """Copies the states and blocks of a step: states in order, swaps out, swaps in, and copy-on-write."""
        for move in step.state_moves:
            self._move_state(move)
        copy_blocks(self.cache, self._swap, step.swaps_out, step.swaps_in, step.copies)

    def _move_state(self, move: StateMove) -> None:
        sources = self._swapped_states if move.kind == "swap_in" else self.states
        targets = self._swapped_states if move.kind == "swap_out" else self.states
        for source, target in zip(sources, targets, strict=True):
            target[:, move.target] = source[:, move.source]
