"""The trial of a model with an image, a video and a sound: what its plan has to know of their tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_armllm.engine.images.attention_masks import spans_of
from torch_armllm.engine.images.decoder_call import DecoderCall, ReadingModel
from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.images.media_facts import Feature, MediaFacts
from torch_armllm.engine.images.modalities import MODALITIES, names_of
from torch_armllm.engine.images.observed_run import ObservedRun, multiplier, observe
from torch_armllm.engine.images.processor_inputs import inputs_of
from torch_armllm.engine.images.prompt_rows import PromptRows, has_places, shown_tokens
from torch_armllm.engine.images.trial_prompts import trial_item, trial_texts

logger = logging.getLogger(__name__)
_EXPLAINED = 1e-3
"""Relative difference of two tensors of which one explains the other."""


class TrialPrompt(NamedTuple):
    """A prompt with one item, and what the model's own modules make of it.

    Attributes:
        modality: of the item.
        ids: int64 ``(T,)``.
        call: of the decoder.
        run: of the whole model.
        shown: tokens bool ``(T,)`` of the item.
        is_whole: see `MediaFacts`.
        inputs: of the model.
    """

    modality: str
    ids: Tensor
    call: DecoderCall
    run: ObservedRun
    shown: Tensor
    is_whole: bool
    inputs: dict[str, Any]

    def rows(self, reading: ReadingModel, facts: MediaFacts, dtype: torch.dtype) -> PictureRows:
        """Returns the rows of its tokens."""
        return PromptRows(reading, facts).of(self.ids, self.call, dtype)


class Trial:
    """Tries a model with an item of each modality.

    Args:
        ways: the modules that may take what the processor makes: the base model, and the whole model.
        processor: the model's own.
        dtype: of the hidden states.
        pad_token: id of padding; None: there is none.
    """

    def __init__(
        self,
        ways: Sequence[Callable[[], ReadingModel]],
        processor: Any,
        dtype: torch.dtype,
        pad_token: int | None,
    ) -> None:
        self._ways, self._processor, self._dtype, self._pad_token = ways, processor, dtype, pad_token
        self.prompts: list[TrialPrompt] = []
        self.reasons: dict[str, str] = {}
        self.readers: dict[bool, ReadingModel] = {}

    def run(self, modalities: Sequence[str]) -> MediaFacts:
        """Returns what is found out about some modalities; `prompts` are then those of the trial."""
        for modality in modalities:
            if MODALITIES[modality].argument_of(self._processor) is None:
                self.reasons[modality] = f"its processor takes no {MODALITIES[modality].noun}"
                continue
            try:
                self.prompts.append(self._prompt(modality))
            except (ValueError, RuntimeError, TypeError) as error:
                self.reasons[modality] = str(error)
        return self._facts()

    def _prompt(self, modality: str) -> TrialPrompt:
        """Returns the first prompt that the model takes.

        Raises:
            ValueError: it takes none; the message is that of the one that came furthest.
        """
        items, failures = {modality: [trial_item(modality, self._processor)]}, list[tuple[int, str]]()
        readings = [self._reading(is_whole) for is_whole in (False, True)]
        asks = {name: value for each in readings for name, value in each.asks.items()}
        for text in trial_texts(modality, self._processor):
            try:
                inputs = inputs_of(self._processor, text, items, asks, {})
            except Exception as error:  # noqa: BLE001 - processors raise errors of any kind
                failures.append((0, f"its processor refuses {MODALITIES[modality].noun}: {error}"))
                continue
            for is_whole, reading in enumerate(readings):
                try:
                    return self._tried(modality, inputs, reading, bool(is_whole))
                except Exception as error:  # noqa: BLE001 - and so do models
                    logger.debug("a trial of %s failed", modality, exc_info=True)
                    failures.append((1, str(error) or type(error).__name__))
        raise ValueError(max(failures, key=lambda each: each[0])[1])

    def _tried(
        self, modality: str, inputs: dict[str, Any], reading: ReadingModel, is_whole: bool
    ) -> TrialPrompt:
        inputs = in_dtype(inputs, self._dtype)
        ids = inputs["input_ids"][0]
        call, run = observe(reading, inputs)
        shown = shown_tokens(reading, ids, call)
        if not shown.any():
            raise ValueError("it gives its language model no embeddings of them")
        if shown.all():
            raise ValueError("it gives its language model other embeddings of text than its table holds")
        if not is_read(reading, inputs, call):
            raise ValueError("it gives its language model the same embeddings without the item")
        return TrialPrompt(modality, ids, call, run, shown, is_whole, inputs)

    def _reading(self, is_whole: bool) -> ReadingModel:
        if is_whole not in self.readers:
            self.readers[is_whole] = self._ways[is_whole]()
        return self.readers[is_whole]

    def _facts(self) -> MediaFacts:
        """Returns what the prompts have in common; one that differs from those before is left out."""
        facts = MediaFacts(())
        kept = []
        for prompt in self.prompts:
            reading = self.readers[prompt.is_whole]
            try:
                own = facts_of(prompt, reading, self._pad_token)
                facts = together(facts, own) if facts.modalities else own
                kept.append(prompt)
            except ValueError as error:
                self.reasons[prompt.modality] = str(error)
        self.prompts = kept
        return replace(facts, reasons=self.reasons)


def is_read(reading: ReadingModel, inputs: dict[str, Any], call: DecoderCall) -> bool:
    """True if embeddings depend on the item: a model's forward may take it by ``**kwargs`` and drop it."""
    others = {
        name: value
        for name, value in inputs.items()
        if not (isinstance(value, Tensor) and value.is_floating_point())
    }
    if len(others) == len(inputs):
        return True
    try:
        without = reading.decoder_call(others)
    except Exception:  # noqa: BLE001 - models that miss their item raise errors of any kind
        return True
    return without.tokens != call.tokens or not torch.equal(without.embeddings, call.embeddings)


def in_dtype(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the inputs of a model with its dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def facts_of(prompt: TrialPrompt, reading: ReadingModel, pad: int | None) -> MediaFacts:
    """Returns what one prompt shows.

    Raises:
        ValueError: it is something that plans do not compute.
    """
    call, run = prompt.call, prompt.run
    spans, only_windows = spans_of(call.mask, call.tokens)
    factor = multiplier(call.embeddings, run.first, ~prompt.shown)
    features = tuple(_features(prompt, factor))
    token = _token(prompt, reading, pad)
    facts = MediaFacts(
        modalities=(prompt.modality,),
        is_whole=prompt.is_whole,
        looks_ahead="" if not spans else "windows" if only_windows else "all",
        features=features,
        mask=_mask_of(prompt) if features else "",
        factor=factor,
        token=token,
        known=frozenset(call.others),
    )
    return _with_positions(facts, call, run)


def together(one: MediaFacts, other: MediaFacts) -> MediaFacts:
    """Returns what two modalities of a model have in common.

    Raises:
        ValueError: the plan of one would not compute the other.
    """
    for name in ("is_whole", "first", "token"):
        if getattr(one, name) != getattr(other, name):
            raise ValueError(
                f"its {names_of(other.modalities)} and {names_of(one.modalities)} differ in {name}"
            )
    if one.axes and other.axes and (one.axes, one.has_places) != (other.axes, other.has_places):
        raise ValueError("its modalities have different positions")
    if one.looks_ahead and other.looks_ahead and one.looks_ahead != other.looks_ahead:
        raise ValueError("its modalities let tokens of other layers attend to later ones")
    return MediaFacts(
        modalities=(*one.modalities, *other.modalities),
        is_whole=one.is_whole,
        axes=one.axes or other.axes,
        has_places=one.has_places or other.has_places,
        first=one.first,
        looks_ahead=one.looks_ahead or other.looks_ahead,
        features=tuple(dict.fromkeys((*one.features, *other.features))),
        mask=one.mask or other.mask,
        factor=one.factor,
        token=one.token,
        known=one.known | other.known,
    )


def _with_positions(facts: MediaFacts, call: DecoderCall, run: ObservedRun) -> MediaFacts:
    positions, places = call.positions, torch.arange(call.tokens)
    if positions is None:
        return facts
    if positions.dim() == 3 and run.rotary is not None and len(run.rotary) == 3:
        axes = run.rotary[0]
        if len(positions) not in (axes, axes + 1):
            raise ValueError(f"its tokens have {len(positions)} positions, and it rotates by {axes}")
        return replace(facts, axes=axes, has_places=len(positions) > axes)
    first = int(positions.flatten()[0])
    if not has_places(positions, places + first):
        raise ValueError("its tokens have other positions than their places")
    return replace(facts, first=first)


def _features(prompt: TrialPrompt, factor: float) -> Iterator[Feature]:
    """Yields what is added to the hidden states of the item's tokens, by the decoder's arguments.

    Raises:
        ValueError: something is added that no argument holds.
    """
    added = dict(prompt.run.added)
    if (first := prompt.run.first) is not None and first.shape == prompt.call.embeddings.shape:
        difference = first - factor * prompt.call.embeddings
        if difference[prompt.shown].norm() > _EXPLAINED * first[prompt.shown].norm():
            added[-1] = difference
    leaves = list(_leaves(prompt.call.others, ()))
    for layer, rows in sorted(added.items()):
        to = rows.any(-1)
        if (to & ~prompt.shown).any():
            if (to & ~prompt.shown).sum() * 2 > (~prompt.shown).sum():
                continue  # its layers are not one after another, as those of a text are
            raise ValueError("it adds features to tokens of text")
        found = next((path for path, leaf in leaves if _explains(leaf, rows[to])), None)
        if found is None:
            raise ValueError(f"it adds rows after layer {layer} that are none of its arguments")
        yield Feature(found, layer)


def _explains(leaf: Tensor, rows: Tensor) -> bool:
    if leaf.shape != rows.shape or not leaf.is_floating_point():
        return False
    # rows are differences of rounded sums
    return bool((leaf.float() - rows.float()).norm() <= 0.05 * rows.float().norm())


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, number))


def _mask_of(prompt: TrialPrompt) -> str:
    """Returns the argument of the decoder that tells the tokens of the item; empty: there is none."""
    tokens = prompt.call.tokens
    for name, value in prompt.call.others.items():
        if isinstance(value, Tensor) and value.dtype == torch.bool and value.shape[:2] == (1, tokens):
            return name
    return ""


def _token(prompt: TrialPrompt, reading: ReadingModel, pad: int | None) -> int:
    """Returns the id that tokens of an item have for layers that embed tokens too.

    Raises:
        ValueError: there is none.
    """
    vocabulary = reading.module.get_input_embeddings().num_embeddings
    likely = pad if pad is not None and 0 <= pad < vocabulary else 0
    given = prompt.call.others.get("per_layer_inputs")
    if not isinstance(given, Tensor):
        return likely
    for token in (likely, 0):
        ids = prompt.ids.masked_fill(prompt.shown, token)[None]
        if torch.equal(given, reading.decoder.get_per_layer_inputs(ids)):
            return token
    raise ValueError("its layers embed tokens of its items as others than that of padding")
