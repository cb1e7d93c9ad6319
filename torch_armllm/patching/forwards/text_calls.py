"""Computation of an encoder's calls, on whole texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.hf.base_model import default_positions
from torch_armllm.hf.cache_names import cache_field
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.forwards.calls import CallArguments, TokenCalls
from torch_armllm.patching.forwards.text_steps import TextSteps, whole_texts
from torch_armllm.patching.forwards.unserved import Unserved
from torch_armllm.plan.step import Plan

_TYPES = "token_type_ids"


class TextCalls(TokenCalls):
    """Computation of an encoder's calls: the plan on packed tokens of whole texts.

    Padding is not computed.  Its hidden states are zeros; those before a text are copies of its first
    token's, which heads read at position 0.

    Args:
        kind, plan, shape, max_length: see `TokenCalls`.
        has_window: True if tokens of a layer attend to their neighbors only.
    """

    arguments = (*TokenCalls.arguments, _TYPES)

    def __init__(
        self, kind: ModelKind, plan: Plan, shape: Shape, max_length: int | None, has_window: bool
    ) -> None:
        super().__init__(kind, plan, shape, max_length)
        self._has_window = has_window
        self._steps = TextSteps(shape)

    def reads_weights(self, call: CallArguments) -> bool:
        """See `Calls.reads_weights`."""
        return True

    def results_of(self, hidden: Tensor) -> dict[str, Any]:
        """See `TokenCalls.results_of`."""
        pooler = getattr(self.base, "pooler", None)
        return {"pooler_output": None if pooler is None else pooler(hidden)}

    def compute(self, call: CallArguments) -> Any:
        """See `Calls.compute`."""
        ids, mask = self.checked_ids(call, None), call.mask
        if call.named.get("use_cache") and cache_field(self._outputs.kind) is not None:
            raise Unserved("a cache is requested, and tokens attend to later ones")
        if mask is not None and mask.shape != ids.shape:
            raise Unserved(f"the attention mask has the shape {tuple(mask.shape)}")
        ids = ids.long()
        kept = None if mask is None or bool((mask != 0).all()) else mask != 0
        if kept is not None and self._has_window and _has_holes(kept):
            raise Unserved("the attention mask leaves out tokens within a text")
        types = self._types_of(ids, call.named.get(_TYPES))
        return self.output(self._compute(ids, kept, self._positions(ids, call.positions), types), None, call)

    def _positions(self, ids: Tensor, given: Tensor | None) -> Tensor:
        if given is not None:
            return given.expand(ids.shape).long()
        if not self.first_position:
            return torch.arange(ids.shape[1]).expand(ids.shape)
        own: Tensor = default_positions(self.base, ids)
        return own

    def _types_of(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        taken = self.kind.token_input
        if taken is None:
            if given is not None and getattr(self.base.config, "type_vocab_size", None) != 0:
                raise Unserved("token types are given, and the model has none")
            return None
        if given is None:
            return torch.zeros_like(ids)
        if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < taken.count:
            raise IndexError(f"token types must be in 0 … {taken.count - 1}")
        return given.expand(ids.shape).long()

    def _compute(self, ids: Tensor, kept: Tensor | None, positions: Tensor, types: Tensor | None) -> Tensor:
        texts, length = ids.shape
        counts = torch.full((texts,), length) if kept is None else kept.sum(1)
        if ids.numel():
            self.check_length(int(counts.max()))
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
            columns, dtype = self.base.config.hidden_size, next(self.base.parameters()).dtype
            return torch.zeros(texts, length, columns, dtype=dtype)
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
