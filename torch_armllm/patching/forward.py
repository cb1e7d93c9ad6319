"""``forward`` of a patched model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock, local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from torch_armllm.hf.base_model import first_position_of, position_limit
from torch_armllm.hf.cache_names import cache_argument, take_cache
from torch_armllm.hf.outputs import OutputForm
from torch_armllm.kv_cache.encoder_keys import EncoderKeys
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.module_fallback import ModuleFallback, Unserved
from torch_armllm.patching.padding import (
    begins_padded,
    check_beginnings,
    check_gaps,
    check_mask,
    check_packing,
    kept_tokens,
    one_position,
    reading,
)
from torch_armllm.patching.paged_cache import PagedCache
from torch_armllm.patching.pool_reuse import PoolReuse
from torch_armllm.patching.token_log import TokenLog
from torch_armllm.plan.step import Plan, StepInputs
from torch_armllm.system.forks import warn_if_forked

_IGNORED = {
    "cache_position",
    "return_dict",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "logits_to_keep",  # a base model may drop positions for it; the head computes all that it receives
}
_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")


class _OfThread(local):
    """Wishes of a thread for its own calls."""

    hidden: Tensor | None = None
    """The hidden states that calls return."""
    is_asked = False
    """True if calls raise an error."""


class _CalledError(Exception):
    """A call arrived that only asks whether it would."""


class PatchedForward(ModuleFallback):
    """``forward`` of a base model: the plan on a paged cache, or the modules if it cannot serve a call."""

    def __init__(
        self,
        base: nn.Module,
        plan: Plan,
        shape: Shape,
        vocab_size: int,
        max_length: int | None = None,
        needs_recompute: bool = False,
        begins_at_zero: bool = False,
    ) -> None:
        super().__init__(base)
        self.plan = plan
        self.shape = shape
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.needs_recompute = needs_recompute
        """True if modules cannot continue from the plan's cache, and recompute the whole sequence."""
        self.begins_at_zero = begins_at_zero
        """True if recurrent layers begin anew at position 0; the plan does so at a sequence's first token."""
        self.first_position = first_position_of(base)
        self._cache_name = cache_argument(base.forward)
        self._outputs = OutputForm(base)
        self._counts_mask = any(map(_reads_mask, base.modules()))
        self.gap_limit: int | None = 0
        """See `check_gaps`."""
        self.reads_hidden = True
        """True if the last column counts where it is hidden, as in models that predict the next token."""
        self._own = _OfThread()
        self._lock = RLock()  # the steps of threads follow each other in the plan anyway
        self._pools = PoolReuse(shape)
        config: Any = base.config
        self._layer_kinds = list(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the base model; its own ``forward`` documents the arguments."""
        self.raise_if_asked()
        warn_if_forked()
        named = take_cache(kwargs)
        past = past_key_values if named is None else named
        if self._own.hidden is not None:
            return self._output(self._own.hidden, None, kwargs)
        try:
            self.raise_if_by_modules()
            self.raise_if_changed(past is None or input_ids is None or input_ids.shape[-1] > 1)
            if input_ids is None or inputs_embeds is not None:
                raise Unserved("inputs_embeds are given")
            self._check(past, attention_mask, kwargs)
            check_packing(position_ids, attention_mask, past)
            self._check_length(past, input_ids.shape[1])
            with self._lock:
                cache, keep = self._cache(past, use_cache, input_ids, attention_mask)
                hidden = self._step(cache, input_ids, attention_mask, position_ids)
        except Unserved as reason:
            self._warn(str(reason))
            if self.needs_recompute and isinstance(past, PagedCache):
                self._recompute(past)
            return self.module_forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **{self._cache_name: past},
                **kwargs,
            )
        return self._output(hidden, cache if keep else None, kwargs)

    def _output(self, hidden: Tensor, cache: Any, arguments: dict[str, Any], **fields: Any) -> Any:
        """Returns hidden states and the cache in the form that the arguments of a call ask for."""
        out = self._outputs.make(hidden, cache, **fields)
        wants_dict = arguments.get("return_dict")
        if wants_dict is None:
            wants_dict = getattr(self.base.config, "return_dict", True)
        return out if wants_dict else out.to_tuple()

    def raise_if_asked(self) -> None:
        """Raises an error while `is_called_by` asks whether a model calls this."""
        if self._own.is_asked:
            raise _CalledError

    def is_called_by(self, model: Callable[..., Any]) -> bool:
        """True if a model calls its base model; False if it calls parts of it itself, past a plan."""
        self._own.is_asked = True
        try:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
        except _CalledError:
            return True
        finally:
            self._own.is_asked = False
        return False

    @contextmanager
    def returning(self, hidden: Tensor) -> Iterator[None]:
        """Makes calls return these hidden states ``(batch, T, hidden)`` while the context lasts.

        The model then computes only the part after its base model.
        """
        self._own.hidden = hidden
        try:
            yield
        finally:
            self._own.hidden = None

    def _check(self, past: Any, mask: Any, kwargs: dict[str, Any]) -> None:
        config = self.base.config
        if past is not None and type(past) not in (DynamicCache, PagedCache):
            raise Unserved(f"the cache is a {type(past).__name__}")
        for name in _RECORDED:
            requested = kwargs.get(name)
            if requested if requested is not None else getattr(config, name, False):
                raise Unserved(f"{name} is requested")
        # `generate` passes empty encodings to a multimodal model if no other modality is given
        unknown = sorted(k for k, v in kwargs.items() if k not in _IGNORED and not _is_nothing(v))
        if unknown:
            raise Unserved(f"the fast path does not know {', '.join(unknown)}")
        check_mask(mask)
        if self.base.training:
            raise Unserved("the model is in training mode")

    def _check_length(self, past: Any, length: int) -> None:
        if self.max_length is None:
            return
        before = past.get_seq_length() if past is not None else 0
        if before + length > self.max_length:
            raise Unserved(f"the plan supports at most {self.max_length} tokens")

    def _recompute(self, cache: PagedCache) -> None:
        """Turns a paged cache into the modules' own, in place, and recomputes its tokens with the modules."""
        token_log = cache.token_log
        config: Any = self.base.config
        cache.give_back(config.get_text_config(decoder=True))
        if token_log is not None and token_log.ids.shape[1]:
            self.module_forward(
                input_ids=token_log.ids,
                attention_mask=token_log.kept,
                position_ids=token_log.positions,
                use_cache=True,
                **{self._cache_name: cache},
            )

    def _cache(
        self, past: Any, use_cache: bool | None, input_ids: Tensor, mask: Tensor | None
    ) -> tuple[PagedCache, bool]:
        batch = input_ids.shape[0]
        if past is None:
            keep = use_cache if use_cache is not None else getattr(self.base.config, "use_cache", True)
            cache = self._pools.cache(lambda pool: PagedCache(pool, batch))
            cache.layer_kinds = self._layer_kinds
            cache.token_log = TokenLog(batch) if keep and self.needs_recompute else None
            return cache, bool(keep)
        if type(past) is DynamicCache:
            if self.needs_recompute and _is_filled(past):
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
        if self.needs_recompute and past.token_log is None:
            past.token_log = TokenLog(batch)
        if len(past.rows) != batch:
            raise ValueError(f"the cache holds {len(past.rows)} sequences but the batch has {batch}")
        return past, True

    def _step(
        self,
        cache: PagedCache,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        encoder: EncoderKeys | None = None,
    ) -> Tensor:
        ids = ids.long()  # modules take int32 as well
        batch, length = ids.shape
        past = cache.padded_length
        positions = one_position(positions)
        kept = kept_tokens(cache, mask, length)
        columns = cache.columns_with(kept, length)
        hidden_ends = _hidden_ends(kept)
        ends = hidden_ends if self.reads_hidden else hidden_ends[:0]
        check_gaps(columns, self.gap_limit, reads_last=len(ends) > 0)
        if self.begins_at_zero and positions is not None:
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

    def check_ids(self, least: int, most: int) -> None:
        """Raises IndexError unless the least and the greatest token id of an input are the model's."""
        if most >= self.vocab_size or least < 0:
            raise IndexError(
                f"token ids must be in 0 … {self.vocab_size - 1}; the input has {least} … {most}"
            )

    def check_position(self, most: int) -> None:
        """Raises ValueError if the greatest position of an input is past the model's last one."""
        limit = position_limit(self.base.config)
        if limit is not None and most >= limit:
            raise ValueError(
                f"the input reaches position {most}, but max_position_embeddings is {limit}: "
                "shorten the prompt or max_new_tokens, or load the model with rope scaling for longer texts"
            )


def with_gradients_by_modules(model: nn.Module, *patched: ModuleFallback) -> Callable[..., Any]:
    """Wraps the model's own ``forward`` so that the modules compute a loss that is to be differentiated."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        has_loss = kwargs.get("labels") is not None and torch.is_grad_enabled()
        if has_loss and any(p.requires_grad for p in model.parameters()):
            with ExitStack() as stack:
                for each in patched:
                    stack.enter_context(each.by_modules("labels are given and gradients are enabled"))
                return own(*args, **kwargs)
        return own(*args, **kwargs)

    return forward


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


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value)


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
