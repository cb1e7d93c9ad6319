"""``forward`` of a patched encoder."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.hf.base_model import default_positions, type_count_of
from torch_armllm.hf.cache_names import cache_field
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.forward import PatchedForward
from torch_armllm.patching.module_fallback import Unserved
from torch_armllm.patching.padding import check_packing
from torch_armllm.patching.text_steps import TextSteps, whole_texts
from torch_armllm.plan.step import Plan
from torch_armllm.system.forks import warn_if_forked

_TAKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "use_cache")


class EncoderForward(PatchedForward):
    """``forward`` of an encoder: the plan on packed tokens, or the modules if it cannot serve a call.

    Padding is not computed.  Its hidden states are zeros; those before a text are copies of its first
    token's, which heads read at position 0.

    Args:
        base: the encoder.
        plan: computes hidden states of whole texts.
        shape: shape of the cache that a step writes and reads.
        vocab_size: number of token ids.
        max_length: most tokens of a text that the plan computes; None: any number.
        has_window: True if tokens of a layer attend to their neighbors only.
    """

    def __init__(
        self,
        base: nn.Module,
        plan: Plan,
        shape: Shape,
        vocab_size: int,
        max_length: int | None,
        has_window: bool,
    ) -> None:
        super().__init__(base, plan, shape, vocab_size, max_length)
        self._signature = inspect.signature(base.forward)
        self._types = type_count_of(base)
        self._has_window = has_window
        self._steps = TextSteps(shape)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the encoder; its own ``forward`` documents the arguments."""
        self.raise_if_asked()
        warn_if_forked()
        named = {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}
        hidden = self._own.hidden
        if hidden is None:
            try:
                with self._lock:
                    hidden = self._hidden(named)
            except Unserved as reason:
                self._warn(str(reason))
                return self.module_forward(*args, **kwargs)
        pooler = getattr(self.base, "pooler", None)
        return self._output(hidden, None, named, pooler_output=None if pooler is None else pooler(hidden))

    def _hidden(self, named: dict[str, Any]) -> Tensor:
        self.raise_if_by_modules()
        self.raise_if_changed(reads_weights=True)
        ids, mask, types, positions, embeds, use_cache = (named.get(name) for name in _TAKEN)
        if ids is None or embeds is not None:
            raise Unserved("inputs_embeds are given")
        if use_cache and cache_field(self._outputs.kind) is not None:
            raise Unserved("a cache is requested, and tokens attend to later ones")
        ignored = getattr(self.base.config, "type_vocab_size", None) == 0
        if types is not None and not self._types and not ignored:
            raise Unserved("token types are given, and the model has none")
        self._check(None, mask, {name: value for name, value in named.items() if name not in _TAKEN})
        check_packing(positions, mask, None)
        if mask is not None and mask.shape != ids.shape:
            raise Unserved(f"the attention mask has the shape {tuple(mask.shape)}")
        ids = ids.long()
        kept = None if mask is None or bool((mask != 0).all()) else mask != 0
        if kept is not None and self._has_window and _has_holes(kept):
            raise Unserved("the attention mask leaves out tokens within a text")
        return self._compute(ids, kept, self._positions(ids, positions), self._types_of(ids, types))

    def _positions(self, ids: Tensor, given: Tensor | None) -> Tensor:
        if given is not None:
            return given.expand(ids.shape).long()
        if not self.first_position:
            return torch.arange(ids.shape[1]).expand(ids.shape)
        own: Tensor = default_positions(self.base, ids)
        return own

    def _types_of(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        if not self._types:
            return None
        if given is None:
            return torch.zeros_like(ids)
        if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < self._types:
            raise IndexError(f"token types must be in 0 … {self._types - 1}")
        return given.expand(ids.shape).long()

    def _compute(self, ids: Tensor, kept: Tensor | None, positions: Tensor, types: Tensor | None) -> Tensor:
        texts, length = ids.shape
        counts = torch.full((texts,), length) if kept is None else kept.sum(1)
        if ids.numel():
            self._check_length(None, int(counts.max()))
            self.check_ids(int(ids.min()), int(ids.max()))
            self.check_position(int((positions if kept is None else positions * kept).max()))
        padded: Tensor | None = None
        for begin, end in whole_texts(counts.tolist()):
            part = None if kept is None else kept[begin:end]
            packed = [None if t is None else _packed(t[begin:end], part) for t in (ids, positions, types)]
            own_ids, own_positions, own_types = packed
            assert own_ids is not None and own_positions is not None
            given = None if own_types is None else own_types[0]
            hidden = self.plan.run(self._steps.step(counts[begin:end], own_ids, own_positions, given))
            if part is None and end - begin == texts:
                return hidden.view(texts, length, -1)
            if padded is None:
                padded = hidden.new_zeros(texts, length, hidden.shape[-1])
            if part is None:
                padded[begin:end] = hidden.view(end - begin, length, -1)
            else:
                padded[begin:end][part] = hidden
        if padded is None:
            config: Any = self.base.config
            return torch.zeros(texts, length, config.hidden_size, dtype=next(self.base.parameters()).dtype)
        if kept is not None:
            _copy_to_front(padded, kept)
        return padded


def _packed(values: Tensor, kept: Tensor | None) -> Tensor:
    """Returns the values ``(texts, length)`` that are kept as one row ``(1, T)``."""
    return (values.reshape(-1) if kept is None else values[kept])[None].contiguous()


def _has_holes(kept: Tensor) -> bool:
    """True if a token between kept ones is left out, in a row of a mask ``(texts, length)``."""
    begins = kept[:, 1:] & ~kept[:, :-1]
    return bool((begins.sum(1) + kept[:, 0] > 1).any())


def _copy_to_front(padded: Tensor, kept: Tensor) -> None:
    """Copies the first kept row of each text to the padding before it."""
    for text in (~kept[:, 0] & kept.any(1)).nonzero().flatten().tolist():
        first = int(kept[text].int().argmax())
        padded[text, :first] = padded[text, first].clone()
