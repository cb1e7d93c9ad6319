"""Ways of calling a model that predicts tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torch_armllm.capture.sample import sample_ids
from torch_armllm.hf.cache_names import CACHE_NAMES
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.patching.trial.judge import Judge, Results, centered

NEW = 4
"""Tokens that ``generate`` adds."""
_PROMPT, _PADDED, _LENGTH = 4, 6, 8
"""Tokens of a prompt, of the longer text of a padded pair, and of the two texts."""
_LARGEST_GAP = 1.0
"""Standard deviations of the logits by which a chosen token's may be below the largest one by modules."""


class TokenWays:
    """A prompt, a loop with the returned cache, padded pairs and ``generate``, on the same two texts.

    The modules compute the texts once, as ``generate`` continued them; each way is compared with a part.

    Args:
        kind: of a patched model.
        judge: compares.
        by_modules: the modules compute what the ways are compared with; False: the plan does, in one call.
    """

    ids_name = "input_ids"

    def __init__(self, kind: ModelKind, judge: Judge, by_modules: bool = True) -> None:
        self.kind, self.model = kind, kind.model
        self.judge = judge
        self._by_modules = by_modules
        self._vocabulary = int(kind.model.get_input_embeddings().num_embeddings)
        self._ids = sample_ids(self._vocabulary, 2 * _LENGTH).view(2, _LENGTH)
        self._logits: Tensor | None = None
        self._cache_names: list[str] = []

    def faults(self) -> Iterator[str | None]:
        """Yields the fault of each way; None if it has none."""
        chosen = self._continue_texts()
        self._compute_expected()
        prompt = partial(self.judge.fault, "a prompt", self._prompt, self._rows(_PROMPT, _PROMPT))
        for name in self._cache_names:
            loop = partial(self._loop, name)
            fault = self.judge.fault(f"a loop with {name}", loop, self._looped())
            yield fault and (prompt() or fault)  # a loop begins with a prompt
        if not self._cache_names:
            yield prompt()
        if chosen is not None and not self._are_best(chosen):
            yield self.judge.fault("generate", self._generated)
        yield from self.padded_faults()

    def padded_faults(self) -> Iterator[str | None]:
        """Yields the fault of a pair of texts with padding on each side."""
        for side in ("left", "right"):
            call = partial(self._padded, side == "left")
            yield self.judge.fault(f"a pair padded on the {side}", call, self._rows(_PROMPT, _PADDED))

    def arguments(self) -> dict[str, Any]:
        """Returns what each call gets beside token ids."""
        return {}

    def generate(self) -> Tensor | None:
        """Returns what ``generate`` returns for two texts; None if it needs more than token ids."""
        ids = self._ids[:, :_PROMPT]
        generated: Tensor = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        return generated

    def _continue_texts(self) -> slice | None:
        """Lets ``generate`` continue the texts; returns the columns of its tokens, None if there are none."""
        if not self.kind.generates:
            return None
        try:
            tokens = self.generate()
        except Exception:  # noqa: BLE001 - the judge calls it again
            return slice(0, 0)
        if tokens is None or tokens.shape[1] <= NEW or tokens.shape[1] > _LENGTH:
            return None
        self._ids[:, : tokens.shape[1]] = tokens
        return slice(tokens.shape[1] - NEW, tokens.shape[1])

    def _compute_expected(self) -> None:
        with self.judge.by_modules(self._by_modules):
            try:
                out = self._call(self._ids, use_cache=True)
            except Exception:  # noqa: BLE001 - then the judge compares each way with the same call
                return
        self._logits = centered(out.logits)
        self._cache_names = [name for name in CACHE_NAMES if getattr(out, name, None) is not None]

    def _are_best(self, columns: slice) -> bool:
        """True if most tokens that ``generate`` chose are the best ones, but for rounding."""
        chosen = self._ids[:, columns]
        if self._logits is None or not chosen.numel():
            return False
        before = self._logits[:, columns.start - 1 : columns.stop - 1]
        gaps = before.amax(-1) - before.gather(-1, chosen[..., None])[..., 0]
        return float((gaps / before.std(-1)).median()) <= _LARGEST_GAP

    def _call(self, ids: Tensor, **arguments: Any) -> Any:
        return self.model(**{self.ids_name: ids}, **self.arguments(), **arguments)

    def _rows(self, *lengths: int) -> Results | None:
        """Returns the logits of the beginnings of the texts."""
        return (
            None
            if self._logits is None
            else [row[:length] for row, length in zip(self._logits, lengths, strict=True)]
        )

    def _looped(self) -> Results | None:
        """Returns the logits of a prompt, and of the next token of each text."""
        rows = self._rows(_PROMPT, _PROMPT)
        return None if rows is None or self._logits is None else [*rows, self._logits[:, _PROMPT]]

    def _generated(self) -> Results:
        tokens = self.generate()
        return [] if tokens is None else [one_hot(tokens[:, -NEW:].flatten(), self._vocabulary).float()]

    def _prompt(self) -> Results:
        return list(centered(self._call(self._ids[:, :_PROMPT]).logits))

    def _loop(self, name: str) -> Results:
        out = self._call(self._ids[:, :_PROMPT], use_cache=True)
        next_ids = self._ids[:, _PROMPT : _PROMPT + 1]
        step = self._call(next_ids, use_cache=True, **{name: getattr(out, name)})
        return [*centered(out.logits), centered(step.logits[:, -1])]

    def _padded(self, is_left: bool) -> Results:
        ids, mask = padded_pair(self.kind, self._ids[:, :_PADDED], _PROMPT, is_left)
        logits = centered(self._call(ids, attention_mask=mask).logits)
        return [row[kept != 0] for row, kept in zip(logits, mask, strict=True)]


def padded_pair(kind: ModelKind, ids: Tensor, length: int, is_left: bool) -> tuple[Tensor, Tensor]:
    """Returns two texts, the first of fewer tokens, and their attention mask.

    Args:
        kind: of the model whose padding token is used.
        ids: ``(2, T)``.
        length: tokens of the first text.
        is_left: the padding is on the left, else on the right.
    """
    pad = kind.pad_token
    ids, mask = ids.clone(), torch.ones_like(ids)
    first, padding = ids[0, :length].clone(), ids.shape[1] - length
    hidden = slice(0, padding) if is_left else slice(length, None)
    mask[0, hidden] = 0
    ids[0, hidden] = pad if isinstance(pad, int) and pad >= 0 else 0
    ids[0, mask[0] != 0] = first
    return ids, mask
