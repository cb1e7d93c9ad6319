"""The plan and the head of a process: hidden states and logits of steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.engine.execution.step_feature import StepFeatures
from torch_armllm.engine.reports.trace import NO_TRACE, Trace
from torch_armllm.ops.linear.schemes import same_in_any_batch
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import Plan, StepInputs, StepResult


class StepLayers:
    """Computes the layers of a process, and logits of last hidden states.

    Args:
        model: see `ServableModel`.
        features: of steps, which may have another plan, or keep columns of its results.
        drawable: number of token ids that may be sampled; None: all.
        trace: records the phases of steps.
    """

    def __init__(
        self,
        model: ServableModel,
        features: StepFeatures,
        drawable: int | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.plan: Plan = model.plan if features.plan is None else features.plan
        self.head = model.head
        self.vocab_size = model.vocab_size
        self.fused_head: FusedHead | None = None
        self._may_fuse = True
        self._drawable = model.vocab_size if drawable is None else drawable
        self._kept = features.kept_columns
        # further columns follow those of the last hidden state
        self._hidden_size = (self._kept.start or None) if self._kept else None
        self._trace = trace

    def run(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> StepResult:
        """Computes a step.

        Args:
            inputs: of the step, on this process's cache and states.
            rows: tokens that need logits; None: all.
            best: asks for the most probable tokens too; they are returned if they cost little.
        """
        if rows is None and best and self.fused_head is not None:
            computed = self.fused_head.run(inputs)
            self._trace.mark("decode")
            return computed
        with torch.no_grad():
            hidden = self.plan.run(inputs)
            self._trace.mark("decode" if rows is None else "prefill")
            kept = None if self._kept is None else hidden[:, self._kept.start : self._kept.stop]
            if self._hidden_size is not None:
                hidden = hidden[:, : self._hidden_size].contiguous()
            if rows is not None:
                hidden = hidden[torch.tensor(rows, dtype=torch.int64)]
            logits = self.logits(hidden)
            self._trace.mark("head")
            if rows is None and best and self._may_fuse:
                self._fuse_head(hidden)
        return StepResult(logits, hidden=kept)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits ``(R, vocab_size)`` of last hidden states ``(R, hidden)``."""
        return self.head(hidden) if len(hidden) else hidden.new_empty(0, self.vocab_size)

    def rows_are_exact(self) -> bool:
        """True if a token's logits are known to have the same bits whatever else a step computes."""
        plan = native_plan(self.plan)
        if plan is None:
            return False
        program = plan.program
        head = self.head.weights(torch.zeros(1, program.columns, dtype=program.dtype))
        if head is None or (head.scheme is not None and not same_in_any_batch(head.scheme)):
            return False
        return all(map(same_in_any_batch, program.schemes))

    def _fuse_head(self, hidden: Tensor) -> None:
        """Fuses the head with a native plan, if the head is one matrix product."""
        self._may_fuse = False
        plan = native_plan(self.plan)
        if plan is None:
            return
        weights = self.head.weights(hidden)
        ranks = None if weights is None else weights.ranks
        if weights is not None and (ranks is None or ranks.last_first < self._drawable):
            columns = self._hidden_size, self._kept
            self.fused_head = FusedHead(plan, weights, self._drawable, *columns)
