"""Computes the inputs of steps with a plan: block copies, hidden states, logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torch_armllm.engine.execution.adapter_rows import AdapterRows, AdapterRuns
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.step_features import TEXTS, StepFeatures
from torch_armllm.engine.step import StateMove
from torch_armllm.engine.trace import NO_TRACE, Trace
from torch_armllm.kv_cache.block_copies import copy_blocks
from torch_armllm.kv_cache.shapes import Cache, Shape
from torch_armllm.ops.linear.packed_layout import same_in_any_batch
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import Plan, StepInputs
from torch_armllm.plan.step_result import StepResult
from torch_armllm.system.huge_pages import release_pages


class StepExecutor:
    """Owns the KV cache of an engine and runs its plan.  Every tensor parallel rank has one.

    The system maps memory at the first write, so unused blocks cost nothing.

    Args:
        model: see `ServableModel`.
        sizes: of the caches.
        features: of steps, beside tokens.
        shape: of the KV cache and the states; None: the model's own.
        trace: records the phases of steps.
    """

    def __init__(
        self,
        model: ServableModel,
        sizes: ExecutorSizes,
        features: StepFeatures = TEXTS,
        shape: Shape | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        slots, pictures, kept_columns = features.slots, features.pictures, features.kept_columns
        self.model = model
        self.slots = slots
        self._adapters = None if slots is None else AdapterRows(slots)
        self.plan: Plan = model.plan if pictures is None else pictures.plan
        self.pictures = pictures
        self.head = model.head
        self.shape = model.shape if shape is None else shape
        self.block_size = self.shape.block_size
        self.vocab_size = model.vocab_size
        self.num_blocks, self.swap_blocks = sizes.num_blocks, sizes.swap_blocks
        self.cache: Cache = self.shape.tensors(sizes.num_blocks)
        self._swap: Cache | None = self.shape.tensors(sizes.swap_blocks) if sizes.swap_blocks else None
        self.states = self.shape.states.tensors(sizes.state_slots)
        self._swapped_states = self.shape.states.tensors(sizes.swap_state_slots)
        self._drawable = model.vocab_size if sizes.drawable is None else sizes.drawable
        self._kept = kept_columns
        # further columns follow those of the last hidden state
        self._hidden_size = (kept_columns.start or None) if kept_columns else None
        self._fused_head: FusedHead | None = None
        self._may_fuse = True
        self._trace = trace

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache and the states, swap memory not included."""
        return sum(tensor.nbytes for tensor in self.cache_tensors)

    @property
    def cache_tensors(self) -> list[Tensor]:
        """The memory of the KV cache and of recurrent states."""
        return [tensor for tensor in (*self.cache, *self.states) if tensor is not None]

    def release_cache(self) -> int:
        """Gives the memory of the KV cache back to the system until it is written; returns its bytes."""
        return release_pages(self.cache_tensors)

    def copy(
        self,
        moves: Iterable[StateMove],
        swaps_out: Sequence[tuple[int, int]],
        swaps_in: Sequence[tuple[int, int]],
        copies: Sequence[tuple[int, int]],
    ) -> None:
        """Copies states in order, and blocks; see `Step`."""
        for move in moves:
            self._move_state(move)
        copy_blocks(self.cache, self._swap, swaps_out, swaps_in, copies)

    def holding(self, adapters: AdapterRuns) -> AbstractContextManager[None]:
        """Says which adapters the rows of a step have, while the context lasts."""
        return nullcontext() if self._adapters is None else self._adapters.hold(adapters)

    def run(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> StepResult:
        """Computes a step.

        Args:
            inputs: of the step, on this executor's cache and states.
            rows: tokens that need logits; None: all.
            best: asks for the most probable tokens too; they are returned if they cost little.
        """
        if rows is None and best and self._fused_head is not None:
            computed = self._fused_head.run(inputs)
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

    def compute_logits(self) -> None:
        """Computes logits of the oldest step under way; steps of this class end in `run`."""
        raise RuntimeError("no step is under way")

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
            self._fused_head = FusedHead(plan, weights, self._drawable, *columns)

    def _move_state(self, move: StateMove) -> None:
        sources = self._swapped_states if move.kind == "swap_in" else self.states
        targets = self._swapped_states if move.kind == "swap_out" else self.states
        for source, target in zip(sources, targets, strict=True):
            target[:, move.target] = source[:, move.source]
