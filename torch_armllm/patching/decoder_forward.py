"""``forward`` of a patched decoder that attends to an encoder."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from torch_armllm.hf.cache_names import take_cache
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.encoder_cache import EncoderCache
from torch_armllm.patching.forward import PatchedForward
from torch_armllm.patching.module_fallback import Unserved
from torch_armllm.patching.padding import check_packing
from torch_armllm.plan.step import Plan
from torch_armllm.system.forks import warn_if_forked

_TAKEN = (
    *("input_ids", "attention_mask", "position_ids", "encoder_hidden_states", "encoder_attention_mask"),
    *("inputs_embeds", "use_cache"),
)


class DecoderForward(PatchedForward):
    """``forward`` of a decoder: the plan, which attends to the encoder's tokens, or the modules.

    The modules compute the first token of a call with new encoder states, which fills transformers'
    cross-attention cache; its keys and values become blocks that every step reads.

    Args:
        base: the decoder.
        plan: computes its steps.
        shape: shape of the cache of its own tokens.
        vocab_size: number of token ids.
        max_length: most tokens of a sequence that the plan computes; None: any number.
    """

    def __init__(
        self, base: nn.Module, plan: Plan, shape: Shape, vocab_size: int, max_length: int | None
    ) -> None:
        super().__init__(base, plan, shape, vocab_size, max_length)
        self._signature = inspect.signature(base.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the decoder; its own ``forward`` documents the arguments."""
        self.raise_if_asked()
        warn_if_forked()
        named = {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}
        past = take_cache(named)
        try:
            with self._lock:
                hidden, past = self._hidden(named, past)
        except Unserved as reason:
            self._warn(str(reason))
            if isinstance(past, EncoderDecoderCache) and type(past.cross_attention_cache) is EncoderCache:
                past.is_updated = dict.fromkeys(range(len(past.cross_attention_cache)), True)
                past.cross_attention_cache.give_back()
            return self.module_forward(**named, **{self._cache_name: past})
        return self._output(hidden, past, named)

    def _hidden(self, named: dict[str, Any], past: Any) -> tuple[Tensor, EncoderDecoderCache | None]:
        ids, mask, positions, states, encoder_mask, embeds, use_cache = (named.get(n) for n in _TAKEN)
        self.raise_if_by_modules()
        self.raise_if_changed(past is None or ids is None or ids.shape[-1] > 1)
        if ids is None or embeds is not None:
            raise Unserved("inputs_embeds are given")
        if past is not None and type(past) is not EncoderDecoderCache:
            raise Unserved(f"the cache is a {type(past).__name__}")
        own = None if past is None else past.self_attention_cache
        self._check(own, mask, {name: value for name, value in named.items() if name not in _TAKEN})
        check_packing(positions, mask, own)
        self._check_length(own, ids.shape[1])
        if ids.numel():
            self.check_ids(int(ids.min()), int(ids.max()))  # before modules look them up
        cross = None if past is None else past.cross_attention_cache
        if type(cross) is not EncoderCache:
            cross = self._attended(ids, states, encoder_mask, cross)
        cache, keep = self._cache(own, use_cache, ids, mask)
        hidden = self._step(cache, ids, mask, positions, cross.encoder)
        if past is None and keep:
            past = EncoderDecoderCache(cache, cross)
        if past is not None:
            past.is_updated = dict.fromkeys(range(len(cross)), True)
        return hidden, past if keep else None

    def _attended(
        self, ids: Tensor, states: Tensor | None, mask: Tensor | None, given: DynamicCache | None
    ) -> EncoderCache:
        """Returns the cache of the encoder's tokens: the given one, filled in place, or a new one.

        Raises:
            Unserved: there are no encoder states, modules have filled the cache, or a text has no tokens.
        """
        if given is not None and (type(given) is not DynamicCache or given.get_seq_length() > 0):
            raise Unserved("the cache of the encoder's tokens was filled by modules")
        if states is None:
            raise Unserved("encoder_hidden_states are not given")
        batch, length = states.shape[:2]
        if len(ids) != batch or ids.shape[1] == 0:
            raise Unserved(f"the ids have the shape {tuple(ids.shape)}, for {batch} texts of the encoder")
        if mask is not None and tuple(mask.shape) != (batch, length):
            raise Unserved(f"the encoder's attention mask has the shape {tuple(mask.shape)}")
        kept = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask != 0
        if not bool(kept.any(1).all()):
            raise Unserved("a text of the encoder has no tokens")
        texts = _texts_of(states, kept)
        firsts = [texts.index(number) for number in range(texts[-1] + 1)]
        filled = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.module_forward(
            input_ids=ids[firsts, :1],
            encoder_hidden_states=states[firsts],
            use_cache=True,
            **{self._cache_name: filled},
        )
        cache = filled.cross_attention_cache
        if given is not None:
            given.layers, cache = cache.layers, given
        cache = EncoderCache.adopt(cache, kept[firsts])
        cache.choose(texts)
        return cache


def _texts_of(states: Tensor, kept: Tensor) -> list[int]:
    """Returns the number of each row's text: beams of a text are rows with the same states, in a row."""
    texts = [0]
    for row in range(1, len(states)):
        same = torch.equal(kept[row], kept[row - 1]) and torch.equal(states[row], states[row - 1])
        texts.append(texts[-1] + (not same))
    return texts
