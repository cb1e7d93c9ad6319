"""Computation of a decoder's calls, on a paged cache."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.encoder_keys import EncoderKeys
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.cache.paged_cache import PagedCache, TokenLog
from torch_armllm.patching.forwards.calls import CallArguments, TokenCalls
from torch_armllm.patching.forwards.padding import (
    begins_padded,
    check_beginnings,
    check_gaps,
    kept_tokens,
    one_position,
    reading,
)
from torch_armllm.patching.forwards.unserved import Unserved
from torch_armllm.plan.step import Plan, StepInputs


@dataclass(frozen=True)
class Limits:
    """Differences between the plan of a decoder and its modules.

    Attributes:
        needs_recompute: modules cannot continue from the plan's cache, and recompute the whole sequence.
        begins_at_zero: recurrent layers begin anew at position 0; the plan does so at a sequence's first
            token.
        gap_limit: see `check_gaps`.
        reads_hidden: the last column counts where it is hidden, as in models that predict the next token.
        refusal: reason why modules compute all calls, and the plan is for engines only; None: they do not.
    """

    needs_recompute: bool = False
    begins_at_zero: bool = False
    gap_limit: int | None = 0
    reads_hidden: bool = True
    refusal: str | None = None


class DecoderCalls(TokenCalls):
    """Computation of a decoder's calls: steps that append tokens to a paged cache.

    Args:
        kind, plan, shape, max_length: see `TokenCalls`.
        limits: of the plan.
    """

    def __init__(
        self,
        kind: ModelKind,
        plan: Plan,
        shape: Shape,
        max_length: int | None,
        limits: Limits = Limits(),
    ) -> None:
        super().__init__(kind, plan, shape, max_length)
        self.limits = limits
        self._pools = _PoolReuse(shape)
        self._counts_mask = any(map(_reads_mask, kind.base.modules()))
        text = kind.base.config.get_text_config(decoder=True)
        self._layer_kinds = list(getattr(text, "layer_types", None) or ())

    def compute(self, call: CallArguments) -> Any:
        """See `Calls.compute`."""
        if self.limits.refusal is not None:
            raise Unserved(self.limits.refusal)
        ids = self.checked_ids(call, call.past)
        self.check_length(ids.shape[1], call.past)
        cache, keep = self._cache(call.past, call, ids)
        return self.output(self._step(cache, call, ids), cache if keep else None, call)

    def by_modules(self, call: CallArguments) -> Any:
        """See `Calls.by_modules`."""
        if self.limits.needs_recompute and isinstance(call.past, PagedCache):
            self._recompute(call.past)
        return super().by_modules(call)

    def _recompute(self, cache: PagedCache) -> None:
        """Turns a paged cache into the modules' own, in place, and recomputes its tokens with the modules."""
        token_log = cache.token_log
        cache.give_back(self.base.config.get_text_config(decoder=True))
        if token_log is not None and token_log.ids.shape[1]:
            self.module_forward(
                input_ids=token_log.ids,
                attention_mask=token_log.kept,
                position_ids=token_log.positions,
                use_cache=True,
                **{self._cache_name: cache},
            )

    def _cache(self, past: Any, call: CallArguments, ids: Tensor) -> tuple[PagedCache, bool]:
        """Returns the cache that a call continues or begins, and whether the call returns it."""
        batch, mask = ids.shape[0], call.mask
        if past is None:
            use_cache = call.named.get("use_cache")
            keep = use_cache if use_cache is not None else getattr(self.base.config, "use_cache", True)
            cache = self._pools.cache(lambda pool: PagedCache(pool, batch))
            cache.layer_kinds = self._layer_kinds
            cache.token_log = TokenLog(batch) if keep and self.limits.needs_recompute else None
            return cache, bool(keep)
        if type(past) is DynamicCache:
            if self.limits.needs_recompute and _is_filled(past):
                raise Unserved("the given cache was filled by modules")
            if any(not _is_whole(layer) for layer in past.layers):
                raise Unserved("the given cache has dropped positions outside a sliding window")
            length = past.get_seq_length() if _is_filled(past) else 0
            if mask is not None and not bool(mask[:, :length].all()):
                raise Unserved("the given cache holds padding")
            dynamic_cache = past
            past = self._pools.cache(lambda pool: PagedCache.adopt(dynamic_cache, pool, batch))
        if not past.rows:
            past.rows = [SequenceBlocks(past.pool) for _ in range(batch)]
        past.layer_kinds = self._layer_kinds
        if self.limits.needs_recompute and past.token_log is None:
            past.token_log = TokenLog(batch)
        if len(past.rows) != batch:
            raise ValueError(f"the cache holds {len(past.rows)} sequences but the batch has {batch}")
        return past, True

    def _step(
        self, cache: PagedCache, call: CallArguments, ids: Tensor, encoder: EncoderKeys | None = None
    ) -> Tensor:
        """Returns the hidden states ``(batch, T, hidden)`` of a call's tokens, zeros for padding."""
        mask = call.mask
        ids = ids.long()  # modules take int32 as well
        batch, length = ids.shape
        past = cache.padded_length
        positions = one_position(call.positions)
        kept = kept_tokens(cache, mask, length)
        columns = cache.columns_with(kept, length)
        hidden_ends = _hidden_ends(kept)
        ends = hidden_ends if self.limits.reads_hidden else hidden_ends[:0]
        check_gaps(columns, self.limits.gap_limit, reads_last=len(ends) > 0)
        if self.limits.begins_at_zero and positions is not None:
            check_beginnings([row.length for row in cache.rows], positions.expand(batch, length), kept)
        if positions is None:
            first = self.first_position
            if first and bool((ids == first - 1).any()):
                raise Unserved(
                    "the input has padding tokens, and this model numbers their positions in its own way"
                )
            if self._counts_mask and mask is not None and begins_padded(mask != 0):
                raise Unserved("the input is padded on the left, and no position_ids are given")
            positions = torch.arange(first + past, first + past + length)[None]
        positions = positions.expand(batch, length).long()
        counts = [length] * batch if kept is None else kept.sum(1).tolist()
        if kept is None:
            flat_ids, flat_positions = ids.reshape(1, -1), positions.reshape(1, -1)
        else:
            flat_ids, flat_positions = ids[kept][None], positions[kept][None]
        if not all(row.length or count for row, count in zip(cache.rows, counts, strict=True)) and length:
            raise Unserved("the attention mask hides all tokens of a row")
        for computed, places in ((flat_ids, flat_positions), (ids[ends, -1:], positions[ends, -1:])):
            if computed.numel():
                self.check_ids(int(computed.min()), int(computed.max()))
                self.check_position(int(places.max()))
        inputs = StepInputs.pack(cache.pool, cache.rows, counts, flat_ids, flat_positions)
        if encoder is not None:
            inputs.attend_to(encoder, counts)
        cache.columns, cache.padded_length = columns, past + length
        cache.next_positions = (positions[:, -1] + 1).tolist() if length and not len(hidden_ends) else None
        if cache.token_log is not None:
            cache.token_log.append(ids, positions, kept)
        if len(ends):
            inputs = reading(inputs, ends, ids[ends, -1], positions[ends, -1])
        hidden = self.plan.run(inputs)
        if kept is None:
            return hidden.view(batch, length, -1)
        padded = hidden.new_zeros(batch, length, hidden.shape[-1])
        padded[kept] = hidden[: flat_ids.shape[1]]
        padded[ends, -1] = hidden[flat_ids.shape[1] :]
        return padded


class _PoolReuse:
    """Reuses the block pools of deleted caches for new caches.

    The system zeroes new memory page by page, which takes several percent of the time of a short prompt.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._in_use: list[tuple[weakref.ref[PagedCache], BlockPool]] = []

    def cache(self, make: Callable[[BlockPool], PagedCache]) -> PagedCache:
        """Returns a cache that ``make`` builds on a spare pool, or on a new pool if none is spare."""
        spare = [pool for owner, pool in self._in_use if owner() is None]
        pool = spare[0] if spare else BlockPool(self._shape)
        pool.reset()
        cache = make(pool)
        # one spare pool is enough: the others are dropped
        self._in_use = [(owner, pool) for owner, pool in self._in_use if owner() is not None]
        self._in_use.append((weakref.ref(cache), pool))
        return cache


def _reads_mask(module: nn.Module) -> bool:
    """True if a position embedding that gets no positions counts the attention mask, as OPT's does."""
    if not isinstance(module, nn.Embedding):
        return False
    return "attention_mask" in _arguments(type(module))  # type: ignore[arg-type]  # types can be hashed


@functools.cache
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def _hidden_ends(kept: Tensor | None) -> Tensor:
    """Returns the numbers of the rows whose last token is hidden, int64 ``(n,)``.

    Its logits are the ones that a text goes on from, so it is computed as modules do.
    """
    if kept is None or not kept.shape[1]:
        return torch.empty(0, dtype=torch.int64)
    return (~kept[:, -1]).nonzero().flatten()


def _is_filled(cache: DynamicCache) -> bool:
    """True if a cache holds positions, or states of recurrent layers."""
    states = (getattr(layer, "has_previous_state", {}) for layer in cache.layers)
    with_keys = (layer for layer in cache.layers if hasattr(layer, "get_seq_length"))
    return any(True in values.values() for values in states) or any(
        layer.get_seq_length() > 0 for layer in with_keys
    )


def _is_whole(layer: Any) -> bool:
    keys = getattr(layer, "keys", None)
    if not getattr(layer, "is_initialized", False) or keys is None:  # no keys yet, or those of another layer
        return True
    return bool(keys.shape[-2] == layer.get_seq_length())
