"""Attention masks of a call: which tokens a step computes, and which columns of a cache hold none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_armllm.ops.op_call import OpCall
from torch_armllm.patching.cache.paged_cache import PagedCache, has_gap
from torch_armllm.patching.forwards.unserved import Unserved
from torch_armllm.plan.step import StepInputs

_REMEDY = "pad on the left"
_PLACES = ("alibi_slopes", "relative", "profiles", "biases", "later")
"""Arguments of attention that depend on the places of tokens, not on their position ids."""


def check_mask(mask: Any) -> None:
    """Raises `Unserved` unless an attention mask is of the tokens of a batch, or none."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise Unserved(f"the attention mask is a {type(mask).__name__}")
    if mask.dim() != 2:
        raise Unserved(f"the attention mask has {mask.dim()} dimensions")


def kept_tokens(cache: PagedCache, mask: Tensor | None, length: int) -> Tensor | None:
    """Returns a mask ``(batch, length)`` of the new tokens that the attention mask keeps; None: all.

    Raises:
        Unserved: the mask hides tokens that the cache holds, shows tokens that it does not hold, or covers
            another number of positions; or the cache holds padded rows and there is no mask.
    """
    past = cache.padded_length
    if mask is None:
        # Models without attention drop the mask after the prompt; then no new token is padding.
        if any(row.length != past for row in cache.rows) and cache.shape.layers:
            raise Unserved("the cache holds padded rows but no attention mask is given")
        return None
    if tuple(mask.shape) != (len(cache.rows), past + length):
        expected = (len(cache.rows), past + length)
        raise Unserved(f"the attention mask has the shape {tuple(mask.shape)} instead of {expected}")
    kept = mask != 0
    if past:
        if not torch.equal(kept[:, :past], cache.filled_columns()):
            raise Unserved("the attention mask hides tokens that the cache holds")
        kept = kept[:, past:]
    return None if bool(kept.all()) else kept


def check_gaps(columns: Tensor | None, most: int | None, reads_last: bool) -> None:
    """Checks that a plan may leave out the hidden columns of a batch, as it leaves out padding on the left.

    Args:
        columns: bool ``(batch, length)``, of the cache and the new tokens; None: padding is on the left only.
        most: greatest length at which tokens after a gap see what they would without; None: any.
        reads_last: the last column is computed in some row, though it is hidden.

    Raises:
        Unserved: tokens after hidden ones would see others.
    """
    if columns is None or most is None or columns.shape[1] <= most:
        return
    if has_gap(columns) if reads_last else _has_hole(columns):
        raise Unserved(f"the attention mask hides tokens after others ({_REMEDY})")


def _has_hole(columns: Tensor) -> bool:
    """True if a row has hidden columns between others."""
    before, after = columns.cumsum(1) > 0, columns.flip(1).cumsum(1).flip(1) > 0
    return bool((before & after & ~columns).any())


def begins_padded(kept: Tensor) -> bool:
    """True if a token that counts follows padding, in a row of a mask ``(batch, T)``."""
    return bool((kept[:, 1:] & ~kept[:, :-1]).any()) or not bool(kept[:, 0].all())


def gap_limit(graph: fx.GraphModule) -> int | None:
    """Returns the greatest length at which attention does not depend on the places of tokens; None: any.

    The plan stores no hidden tokens, so what follows them moves up.  Position ids are given, but windows and
    biases are of places.
    """
    limits = [0 if _depends_on_places(node) else _window_of(node) for node in graph.graph.nodes]
    return min((limit for limit in limits if limit is not None), default=None)


def _name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", "")) if node.op == "call_function" else ""


def _depends_on_places(node: fx.Node) -> bool:
    name = _name_of(node)
    if name == "paged_attention":
        return any(OpCall(node).gives(each) for each in _PLACES)
    return name in ("select_tokens", "select_blocks", "block_attention")


def _window_of(node: fx.Node) -> int | None:
    window = OpCall(node).window if _name_of(node) in ("paged_attention", "mla_attention") else None
    return window if isinstance(window, int) and window > 0 else None


def reading(inputs: StepInputs, rows: Tensor, ids: Tensor, positions: Tensor) -> StepInputs:
    """Adds a hidden token to some sequences of a step: it sees the stored tokens, and none sees it.

    Args:
        inputs: a step that appends tokens to sequences without states.
        rows: int64 ``(n,)``, numbers of the sequences.
        ids: int64 ``(n,)``.
        positions: int64 ``(n,)``.
    """
    count = len(rows)
    ends = inputs.query_start[-1] + torch.arange(1, count + 1, dtype=torch.int32)
    return replace(
        inputs,
        input_ids=torch.cat([inputs.input_ids, ids[None]], 1),
        position_ids=torch.cat([inputs.position_ids, positions[None]], 1),
        slots=torch.cat([inputs.slots, inputs.slots.new_full((count,), -1)]),
        block_table=torch.cat([inputs.block_table, inputs.block_table[rows]]),
        query_start=torch.cat([inputs.query_start, ends]),
        seq_lens=torch.cat([inputs.seq_lens, inputs.seq_lens[rows]]),
    )


def check_packing(positions: Tensor | None, mask: Any, past: Any) -> None:
    """Raises `Unserved` if position ids pack several texts in a row, which modules then keep apart.

    They do so without a mask and a cache, wherever a position is not that of the token before plus one.
    """
    if positions is None or mask is not None or past is not None or positions.shape[-1] < 2:
        return
    if not bool((positions.diff(dim=-1) == 1).all()):
        raise Unserved("position_ids are those of several texts in a row")


def one_position(positions: Tensor | None) -> Tensor | None:
    """Returns positions ``(batch, T)`` of tokens that may have several, as those of M-RoPE.

    Raises:
        Unserved: those of a token differ, as in pictures.
    """
    if positions is None or positions.dim() != 3:
        return positions
    if not bool((positions == positions[:1]).all()):
        raise Unserved("a token has several positions that differ, as in a picture")
    return positions[0]


def check_beginnings(lengths: Sequence[int], positions: Tensor, kept: Tensor | None) -> None:
    """Checks that the first token of each sequence, and no other, has position 0.

    Args:
        lengths: tokens of each sequence before this call.
        positions: ``(batch, T)``.
        kept: see `kept_tokens`.

    Raises:
        Unserved: another token has.
    """
    for number, length in enumerate(lengths):
        own = positions[number] if kept is None else positions[number][kept[number]]
        first = int(length == 0 and len(own) > 0)
        if own[:first].any() or not own[first:].all():
            raise Unserved("position_ids begin sequences where none begins, or begin one past position 0")
