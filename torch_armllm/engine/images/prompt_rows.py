"""Rows of a prompt's tokens that are no text, from what a model gives to its decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.engine.images.attention_masks import is_mask_of, spans_of
from torch_armllm.engine.images.decoder_call import DecoderCall, ReadingModel
from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.images.media_facts import MediaFacts


class PromptRows:
    """Makes rows of what a model gives to its decoder, and refuses what the plan would compute otherwise.

    Args:
        reading: the model.
        facts: of its trial.
    """

    def __init__(self, reading: ReadingModel, facts: MediaFacts) -> None:
        self._reading, self._facts = reading, facts
        config = reading.module.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        self._window = window if isinstance(window, int) else None

    def of(self, ids: Tensor, call: DecoderCall, dtype: torch.dtype) -> PictureRows:
        """Returns the rows of a prompt.

        Args:
            ids: int64 ``(T,)``.
            call: of the decoder.
            dtype: of the rows.

        Raises:
            ValueError: the decoder is given something that the plan does not know.
        """
        facts, tokens = self._facts, call.tokens
        shown = shown_tokens(self._reading, ids, call)
        spans, only_windows = spans_of(call.mask, tokens)
        if spans and not facts.looks_ahead:
            raise ValueError("its tokens attend to later ones, which those of its trial did not")
        if not is_mask_of(call.mask, tokens, spans, self._window, only_windows):
            longest = max((last - first for first, last in spans), default=0)
            if is_mask_of(call.mask, tokens, spans, self._window, only_windows, past_windows=True):
                raise ValueError(
                    f"an item of {longest} tokens is longer than the window of {self._window} tokens, which "
                    "cuts into it in a plan and not in the model: give a smaller one"
                )
            raise ValueError("its tokens attend to others than the earlier ones and those of their item")
        if spans and only_windows != (facts.looks_ahead == "windows"):
            raise ValueError("its tokens attend to later ones in other layers than those of its trial")
        others = sorted(set(call.others) - facts.known)
        if others:
            raise ValueError(f"its language model is given {', '.join(others)}, which plans do not know")
        self._check_layer_inputs(ids, shown, call.others)
        positions = shown.nonzero()[:, 0].tolist()
        rows = torch.cat(self._columns(shown, call), 1).to(dtype)
        if not rows.isfinite().all():
            raise ValueError("its embeddings are no numbers (NaN or infinite)")
        return PictureRows(positions, rows, self._rotary(call), spans, ids.tolist())

    def _columns(self, shown: Tensor, call: DecoderCall) -> list[Tensor]:
        """Returns the embeddings, and what each of the layers adds, of the n tokens, ``(n, hidden)`` each."""
        facts = self._facts
        embeddings = call.embeddings[shown]
        added = {layer: torch.zeros_like(embeddings) for layer in facts.layers}
        for feature in facts.features:
            found = feature.of(call.others)
            if found is None:
                continue
            to = _tokens_of(call.others.get(facts.mask), shown)
            if int(to.sum()) != len(found) or (to & ~shown).any():
                raise ValueError("it adds features to other tokens than those of its items")
            at = to[shown]
            if feature.layer < 0:
                embeddings[at] += found.to(embeddings.dtype) / facts.factor
            else:
                added[feature.layer][at] += found.to(embeddings.dtype)
        return [embeddings, *added.values()]

    def _rotary(self, call: DecoderCall) -> Tensor | None:
        facts, tokens, positions = self._facts, call.tokens, call.positions
        places = torch.arange(tokens)
        if not facts.axes:
            if not has_places(positions, places + facts.first):
                raise ValueError("its tokens have other positions than their places")
            return None
        if facts.has_places and positions is not None and positions.shape == (1 + facts.axes, 1, tokens):
            if not torch.equal(positions[0, 0], places):
                raise ValueError("its tokens have other places than their own")
            positions = positions[1:]
        if positions is None or positions.shape != (facts.axes, 1, tokens):
            raise ValueError(f"its tokens do not have {facts.axes} positions each")
        return positions[:, 0].T.long().contiguous()

    def _check_layer_inputs(self, ids: Tensor, shown: Tensor, others: dict[str, Any]) -> None:
        given = others.get("per_layer_inputs")
        if given is None:
            return
        replaced = ids.masked_fill(shown, self._facts.token)[None]
        if not torch.equal(given, self._reading.decoder.get_per_layer_inputs(replaced)):
            raise ValueError("its layers embed tokens of its items as others than that of its trial")


def shown_tokens(reading: ReadingModel, ids: Tensor, call: DecoderCall) -> Tensor:
    """Returns the tokens bool ``(T,)`` whose embeddings are not those that a text's would be.

    Raises:
        ValueError: the decoder is given other tokens than the ids.
    """
    if len(ids) != call.tokens:
        raise ValueError(
            f"its language model is given {call.tokens} tokens, and its processor makes {len(ids)}"
        )
    looked, known = reading.looked_up(ids)
    return ~known | (looked.to(call.embeddings.dtype) != call.embeddings).any(-1)


def has_places(positions: Tensor | None, places: Tensor) -> bool:
    """True if positions are places ``(T,)``, in whatever shape they are given; None: they are not given."""
    return positions is None or bool((positions == places).all())


def _tokens_of(mask: Any, shown: Tensor) -> Tensor:
    """Returns the tokens bool ``(T,)`` of a decoder's argument; without one those that are given."""
    if not isinstance(mask, Tensor):
        return shown
    of_tokens: Tensor = mask[0]
    return of_tokens if of_tokens.dim() == 1 else of_tokens.flatten(1).any(-1)
