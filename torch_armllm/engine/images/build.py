"""Builds the reader of a model's images, videos and sounds."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_armllm.engine.images.decoder_call import ReadingModel, decoder_of
from torch_armllm.engine.images.image_input import PictureInput
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.media_facts import MediaFacts
from torch_armllm.engine.images.modalities import MODALITIES
from torch_armllm.engine.images.observed_run import rounded_otherwise
from torch_armllm.engine.images.reader import PictureReader, ReaderLimits
from torch_armllm.engine.images.rotary_axes import rotary_axes
from torch_armllm.engine.images.token_numbers import LaterTokens, RotaryPositions, TokenNumbers
from torch_armllm.engine.images.trial import Trial
from torch_armllm.engine.images.trial_steps import differs, plan_hidden
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.state import is_patched, patch_state, patched_forward, why_not_captured
from torch_armllm.plan.native import NativePlan, native_plan
from torch_armllm.plan.picture_inputs import (
    given_columns,
    input_after,
    with_given_rows,
    with_later_tokens,
    with_rotary_axes,
)
from torch_armllm.plan.placed_program import PlacedProgram
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.quant.inspection import is_packed

logger = logging.getLogger(__name__)
_DOORS = ("get_image_features", "get_video_features", "get_audio_features")
_MEDIA_INPUTS = ("pixel_values", "input_features", "input_values")
"""Names in arguments of models that take images, videos or sounds."""


def takes_media(kind: ModelKind) -> bool:
    """True if a model has a door for images, videos or sounds."""
    parts = (kind.model, kind.base)
    if any(hasattr(part, door) for part in parts for door in _DOORS):
        return True
    arguments = [name for part in parts for name in inspect.signature(part.forward).parameters]
    return any(name in argument for name in _MEDIA_INPUTS for argument in arguments)


def picture_reader(model: Any, processor: Any, limits: ReaderLimits) -> PictureReader | str:
    """Returns the reader of a model's images, videos and sounds, or the reason why it takes none.

    Args:
        model: a patched model, or one from the plan cache.
        processor: the model's own; None: there is none.
        limits: of prompts.
    """
    if isinstance(model, PlanModel):
        return f"{model.name} came from the plan cache, which keeps no vision towers: set ARMLLM_PLAN_CACHE=0"
    kind = patch_state(model).kind
    tried = tried_media(kind, processor, limits.items)
    if isinstance(tried, str):
        return tried
    assert tried.steps is not None
    return reader_of(kind, processor, tried.facts, tried.steps, limits)


class TriedMedia(NamedTuple):
    """Findings of a trial, and the steps that it was made with."""

    facts: MediaFacts
    steps: PictureSteps


def tried_media(kind: ModelKind, processor: Any, limits: Mapping[str, int]) -> TriedMedia | str:
    """Tries a patched model with an item of each modality, or returns the reason why it takes none.

    The model's own modules and its plan compute one short prompt of each modality, and have to agree.

    Args:
        kind: of the model.
        processor: see `picture_reader`.
        limits: most items of a prompt, by modality.
    """
    if not takes_media(kind):
        return f"{kind.name} takes no pictures, sound or videos: it is a model of text"
    wanted = [name for name in MODALITIES if limits.get(name, 0) > 0]
    if not wanted:
        return "limit_mm_per_prompt allows no pictures"
    if processor is None:
        return text_only(kind, "its files have no processor, or Pillow is missing ([vision])")
    forward = patched_forward(kind.model)
    if forward is None or (plan := native_plan(forward.plan)) is None:
        reason = why_not_captured(kind.model) or getattr(getattr(forward, "plan", None), "why_not_native", "")
        return text_only(kind, f"it has no native plan: {reason}" if reason else "it has no native plan")
    trial = Trial(ways_of(kind), processor, plan.program.dtype, kind.pad_token)
    while wanted:
        facts = trial.run(wanted)
        if not facts.modalities:
            break
        try:
            steps = picture_steps(kind, plan, forward.shape, facts)
        except ValueError as error:
            return text_only(kind, error)
        wrong = _compared(trial, facts, steps, forward.shape, kind)
        if not wrong:
            for name, reason in facts.reasons.items():
                logger.info("%s takes no %s: %s", kind.name, MODALITIES[name].noun, reason)
            return TriedMedia(facts, steps)
        wanted = [name for name in facts.modalities if name not in wrong]
        reasons = {**trial.reasons, **wrong}
        trial = Trial(ways_of(kind), processor, plan.program.dtype, kind.pad_token)
        trial.reasons = reasons
    return text_only(kind, _told(trial.reasons))


def _told(reasons: Mapping[str, str]) -> str:
    """Returns the reasons of all modalities, those that are the same once."""
    own = {name: reason for name, reason in reasons.items() if "processor takes no" not in reason} or reasons
    return "; ".join(dict.fromkeys(own.values()))


def _compared(
    trial: Trial, facts: MediaFacts, steps: PictureSteps, shape: Shape, kind: ModelKind
) -> dict[str, str]:
    """Returns the modalities whose prompt the plan computes otherwise than the modules, and how."""
    exact = steps.plan.program.dtype == torch.float32 == shape.dtype and not is_packed(kind.model)
    wrong = {}
    for prompt in trial.prompts:
        hidden = prompt.run.hidden
        assert hidden is not None
        try:
            reading = trial.readers[prompt.is_whole]
            rows = prompt.rows(reading, facts, steps.plan.program.dtype)
            by_plan = plan_hidden(steps, shape, prompt.ids, rows, kind.first_position)
            otherwise = None if exact else partial(rounded_otherwise, reading, prompt.inputs)
            found = differs(by_plan, hidden, prompt.shown, otherwise)
        except ValueError as error:
            found = str(error)
        if found is not None:
            wrong[prompt.modality] = found
    return wrong


def ways_of(kind: ModelKind) -> list[Callable[[], ReadingModel]]:
    """Returns what makes the base model, or the whole one, a model that reads."""
    forward = patched_forward(kind.model) if is_patched(kind.model) else None
    base = kind.base.forward if forward is None else forward.calls.module_forward
    only: Callable[[], AbstractContextManager[Any]] = nullcontext
    if forward is not None:
        only = partial(forward.by_modules, "images, videos and sounds are read by modules")
    return [
        lambda: ReadingModel(kind.base, base, only),
        lambda: ReadingModel(kind.model, kind.model.forward, only),
    ]


def text_only(kind: ModelKind, reason: object) -> str:
    """Returns the error of prompts with pictures to a model that does not take them for some reason."""
    return f"{kind.name} is served for text only: {reason}"


def reader_of(
    kind: ModelKind, processor: Any, facts: MediaFacts, steps: PictureSteps, limits: ReaderLimits
) -> PictureReader:
    """Returns the reader of a model's images, videos and sounds, whose towers become plans.

    Args:
        kind: of a language model.
        processor: see `picture_reader`.
        facts: of its trial.
        steps: what items change in the steps of its plan.
        limits: see `picture_reader`.
    """
    from torch_armllm.engine.images.tower import plan_towers

    reading = ways_of(kind)[facts.is_whole]()
    towers = plan_towers(reading, kind.model.config)
    known = {name: limits.items.get(name, 0) for name in facts.modalities}
    return PictureReader(reading, processor, facts, steps, replace(limits, items=known), towers)


def _numbers(facts: MediaFacts) -> TokenNumbers | None:
    """Returns the numbers of each token that the plan of a model reads beside its id.

    Raises:
        ValueError: it would need two kinds.
    """
    if facts.looks_ahead and facts.axes:
        raise ValueError("its tokens have several positions, and attend to later ones")
    if facts.looks_ahead:
        return LaterTokens(only_windows=facts.looks_ahead == "windows")
    return RotaryPositions(facts.axes) if facts.axes else None


def picture_steps(
    kind: ModelKind, plan: NativePlan, shape: Shape, facts: MediaFacts, is_first: bool = True
) -> PictureSteps:
    """Returns the plan of a model with the inputs that items need.

    Args:
        kind: of the model.
        plan: of its base model.
        shape: of its KV cache.
        facts: of its trial.
        is_first: False for a stage of a pipeline that reads the rows of another one, not embeddings.

    Raises:
        ValueError: the plan has no place for one of them.
    """
    numbers = _numbers(facts)
    program, number = plan.program, input_after(shape.tensors(0), len(shape.states.groups))
    if not is_first:
        number += 1  # that of the rows
    if numbers is not None:
        program, number = _with_numbers(program, numbers, kind, number), number + 1
    if not is_first:
        return PictureSteps(NativePlan(program, plan.experts), None, 0, 0, numbers)
    layers = facts.layers
    scale = float(getattr(kind.base.get_input_embeddings(), "embed_scale", 1.0))
    assert kind.hidden_size is not None, "rows have a width"
    hidden, dtype = kind.hidden_size, program.dtype
    program = with_given_rows(program, hidden, dtype, number, layers, scale)
    rows = PictureInput(given_columns(hidden, len(layers)), dtype)
    return PictureSteps(NativePlan(program, plan.experts), rows, facts.token, len(layers), numbers)


def _with_numbers(
    program: PlacedProgram, numbers: TokenNumbers, kind: ModelKind, number: int
) -> PlacedProgram:
    """Returns a program that reads numbers of each token as a further input, by its number.

    Raises:
        ValueError: the program has no place for them.
    """
    if isinstance(numbers, RotaryPositions):
        if not {"rope", "rope_table", "attention"} & set(program.opcodes):
            return program  # of a stage of recurrent layers
        decoder = decoder_of(kind.model)
        return with_rotary_axes(program, rotary_axes(decoder, program, numbers.columns), number)
    assert isinstance(numbers, LaterTokens)
    return with_later_tokens(program, number, numbers.only_windows)
