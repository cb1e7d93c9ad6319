"""Runs a draft layer on a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.engine.speculative.draft_layer import DraftLayer
from torch_armllm.kv_cache.block_copies import copy_blocks
from torch_armllm.plan.fused_head import FusedHead

_FUSED_ROWS = 8
"""Rows for each drafted token up to which the fused head computes all of them; prompts have more."""


class LayerResult(NamedTuple):
    """Results of a draft layer; they are valid until it computes again."""

    following: Tensor
    """``(T, columns)``: what the step of the next token is given, of every token"""
    logits: Tensor | None
    """``(R, vocab_size)`` of the rows asked for; None if the most probable tokens are enough"""
    best: list[int] | None = None
    """R most probable tokens; None: not computed"""


class LayerRunner:
    """Computes steps of a draft layer.

    Args:
        layer: the draft layer.
        num_blocks: blocks of its KV cache.
        swap_blocks: blocks of its swap memory.
        drawable: number of tokens that may be drafted.
    """

    def __init__(self, layer: DraftLayer, num_blocks: int, swap_blocks: int, drawable: int) -> None:
        self.layer = layer
        self.cache = layer.shape.tensors(num_blocks)
        self.swap = layer.shape.tensors(swap_blocks) if swap_blocks else None
        self._drawable = drawable
        self._builder = StepBuilder(self.cache, layer.shape.block_size)
        self.fused_head: FusedHead | None = None
        self.may_fuse = True

    def copy_blocks(self, step: Step) -> None:
        """Copies the blocks that a step of the model copied."""
        copy_blocks(self.cache, self.swap, step.swaps_out, step.swaps_in, step.copies)

    def compute(
        self, scheduled: list[Scheduled], given: Tensor, rows: GenericSequence[int], best: bool
    ) -> LayerResult:
        """Computes a step.

        Args:
            scheduled: the layer's tokens.
            given: ``(T, columns)``, of every token.
            rows: of the tokens after which one is drafted.
            best: asks for the most probable tokens, if they cost little.
        """
        step = Step(scheduled)
        if best and self.fused_head is not None and len(given) <= _FUSED_ROWS * len(rows):
            found = self._compute_fused(self.fused_head, step, given, rows)
            if found is not None:
                return found
        inputs, _ = self._builder.build(step)
        inputs.given = given.contiguous()
        computed = self.layer.plan.run(inputs)
        head, following = self.layer.head_columns, self.layer.next_columns
        logits = None
        if rows:
            chosen = computed if len(rows) == len(computed) else computed[list(rows)]
            hidden = chosen[:, head.start : head.stop].contiguous()
            logits = self.layer.head(hidden)
            if best and self.may_fuse:
                self.may_fuse = False
                self.fused_head = self.layer.head.fuse(self.layer, hidden, self._drawable)
        return LayerResult(computed[:, following.start : following.stop], logits)

    def _compute_fused(
        self, head: FusedHead, step: Step, given: Tensor, rows: GenericSequence[int]
    ) -> LayerResult | None:
        """Computes a step and its most probable tokens in one call; None if the logits hold no number."""
        if len(rows) == len(given):  # one token of each sequence
            inputs = self._builder.decode(step)
            if inputs.given is None:
                inputs.given = torch.empty_like(given, memory_format=torch.contiguous_format)
            inputs.given.copy_(given)  # a step on the same memory is replayed
        else:
            inputs, _ = self._builder.build(step)
            inputs.given = given.contiguous()
        computed = head.run(inputs)
        assert computed.best is not None and computed.hidden is not None
        best = [computed.best[row] for row in rows]
        if -1 in best:
            return None
        return LayerResult(computed.hidden, None, self.layer.head.tokens(best))
