"""Computation of the calls of a decoder that attends to an encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from torch_armllm.patching.cache.encoder_cache import EncoderCache
from torch_armllm.patching.forwards.calls import CallArguments, TokenCalls
from torch_armllm.patching.forwards.decoder_calls import DecoderCalls
from torch_armllm.patching.forwards.unserved import Unserved


class AttendingCalls(DecoderCalls):
    """Computation of a decoder's calls whose steps attend to the encoder's tokens.

    The modules compute the first token of a call with new encoder states, which fills transformers'
    cross-attention cache; its keys and values become blocks that every step reads.
    """

    arguments = (*TokenCalls.arguments, "encoder_hidden_states", "encoder_attention_mask")

    def compute(self, call: CallArguments) -> Any:
        """See `Calls.compute`."""
        past = call.past
        if past is not None and type(past) is not EncoderDecoderCache:
            raise Unserved(f"the cache is a {type(past).__name__}")
        own = None if past is None else past.self_attention_cache
        ids = self.checked_ids(call, own)
        self.check_length(ids.shape[1], own)
        if ids.numel():
            self.check_ids(int(ids.min()), int(ids.max()))  # before modules look them up
        cross = None if past is None else past.cross_attention_cache
        if type(cross) is not EncoderCache:
            cross = self._attended(call, ids, cross)
        cache, keep = self._cache(own, call, ids)
        hidden = self._step(cache, call, ids, cross.encoder)
        if past is None and keep:
            past = EncoderDecoderCache(cache, cross)
        if past is not None:
            past.is_updated = dict.fromkeys(range(len(cross)), True)
        return self.output(hidden, past if keep else None, call)

    def by_modules(self, call: CallArguments) -> Any:
        """See `Calls.by_modules`."""
        past = call.past
        if isinstance(past, EncoderDecoderCache) and type(past.cross_attention_cache) is EncoderCache:
            past.is_updated = dict.fromkeys(range(len(past.cross_attention_cache)), True)
            past.cross_attention_cache.give_back()
        return super().by_modules(call)

    def _attended(self, call: CallArguments, ids: Tensor, given: DynamicCache | None) -> EncoderCache:
        """Returns the cache of the encoder's tokens: the given one, filled in place, or a new one.

        Raises:
            Unserved: there are no encoder states, modules have filled the cache, or a text has no tokens.
        """
        if given is not None and (type(given) is not DynamicCache or given.get_seq_length() > 0):
            raise Unserved("the cache of the encoder's tokens was filled by modules")
        states, mask = call.named.get("encoder_hidden_states"), call.named.get("encoder_attention_mask")
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
