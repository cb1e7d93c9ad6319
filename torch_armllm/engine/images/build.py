"""Builds the reader of a model's pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_armllm.engine.images.image_input import PictureInput
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.engine.images.rotary_axes import rotary_axes
from torch_armllm.engine.images.token_numbers import LaterTokens, RotaryPositions, TokenNumbers
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.state import patch_state, patched_forward
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

FAMILIES: dict[str, Callable[[], TokenNumbers] | None] = {
    "llava": None,
    "idefics3": None,
    "smolvlm": None,
    "mistral3": None,
    "qwen2_vl": RotaryPositions,
    "qwen2_5_vl": RotaryPositions,
    "gemma3": LaterTokens,
    "gemma3n": None,
    "gemma4": None,
    "internvl": None,
    "qwen3_vl": RotaryPositions,
    "qwen3_vl_moe": RotaryPositions,
    "qwen3_5": RotaryPositions,
    "qwen3_5_moe": RotaryPositions,
    "llama4": None,
    "paligemma": partial(LaterTokens, prompts=True),
}
"""Model types that take pictures, and the numbers of each token that their plans read beside its id."""
_TOWERS = ("vision_tower", "vision_model", "visual")


def picture_reader(model: Any, processor: Any, limit: int, tokens: int) -> PictureReader | str:
    """Returns the reader of a model's pictures, or the reason why it takes none.

    Args:
        model: a patched model, or one from the plan cache.
        processor: the model's own; None: there is none.
        limit: most pictures of a prompt.
        tokens: most tokens of a step.
    """
    if isinstance(model, PlanModel):
        return f"{model.name} came from the plan cache, which keeps no vision towers: set ARMLLM_PLAN_CACHE=0"
    kind, forward = patch_state(model).kind, patched_forward(model)
    if (reason := unknown_family(kind) or why_not_read(kind, processor, limit)) is not None:
        return reason
    if forward is None or (plan := native_plan(forward.plan)) is None:
        return text_only(kind, "it has no native plan")
    try:
        steps = picture_steps(kind, plan, forward.shape)
    except ValueError as reason:
        return text_only(kind, reason)
    return reader_of(kind, forward.calls.module_forward, processor, steps, limit, tokens)


def unknown_family(kind: ModelKind) -> str | None:
    """Returns the reason why a model is none whose pictures are known; None if it is one."""
    if not kind.sees:
        return f"{kind.name} takes no pictures: it is a model of text"
    if kind.family not in FAMILIES:
        return text_only(kind, f"only pictures of {', '.join(FAMILIES)} are known")
    return None


def why_not_read(kind: ModelKind, processor: Any, limit: int) -> str | None:
    """Returns the reason why nothing reads a model's pictures; see `picture_reader`."""
    if limit == 0:
        return "limit_mm_per_prompt allows no pictures"
    if processor is None:
        return text_only(kind, "its files have no processor, or Pillow is missing ([vision])")
    return None


def text_only(kind: ModelKind, reason: object) -> str:
    """Returns the error of prompts with pictures to a model that does not take them for some reason."""
    return f"{kind.name} is served for text only: {reason}"


def reader_of(
    kind: ModelKind,
    own: Callable[..., Any],
    processor: Any,
    steps: PictureSteps,
    limit: int,
    tokens: int,
) -> PictureReader:
    """Returns the reader of a model's pictures, whose vision tower becomes a plan.

    Args:
        kind: of a language model.
        own: the ``forward`` of the base model that is no plan's.
        steps: what pictures change in the steps of its plan.
        processor: see `picture_reader`.
        limit: likewise.
        tokens: likewise.
    """
    model, base = kind.model, kind.base
    named = next((part for part in _TOWERS if hasattr(base, part)), None)
    if named is None:  # Llama 4: its base model is that of its language model
        base, own = model, model.forward
        named = next((part for part in _TOWERS if hasattr(model, part)), None)
    from torch_armllm.engine.images.tower import plan_tower

    layers = None if named is None else plan_tower(getattr(base, named), model.config)
    return PictureReader(base, own, processor, steps, limit, tokens, layers)


def _numbers(kind: ModelKind) -> TokenNumbers | None:
    """Returns the numbers of each token that the plan of a model reads beside its id."""
    if getattr(kind.model.config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        return LaterTokens(only_windows=True)
    make = FAMILIES[kind.family]
    return None if make is None else make()


def picture_steps(kind: ModelKind, plan: NativePlan, shape: Shape, is_first: bool = True) -> PictureSteps:
    """Returns the plan of a model with the inputs that pictures need.

    Args:
        kind: of the model.
        plan: of its base model.
        shape: of its KV cache.
        is_first: False for a stage of a pipeline that reads the rows of another one, not embeddings.

    Raises:
        ValueError: the plan has no place for one of them.
    """
    base, numbers = kind.base, _numbers(kind)
    program, number = plan.program, input_after(shape.tensors(0), len(shape.states.groups))
    if not is_first:
        number += 1  # that of the rows
    if numbers is not None:
        program, number = _with_numbers(program, numbers, base, number), number + 1
    if not is_first:
        return PictureSteps(NativePlan(program, plan.experts), None, 0, 0, numbers)
    layers = len(getattr(kind.model.config.vision_config, "deepstack_visual_indexes", None) or ())
    scale = float(getattr(base.get_input_embeddings(), "embed_scale", 1.0))
    assert kind.hidden_size is not None, "rows have a width"
    hidden, dtype = kind.hidden_size, program.dtype
    program = with_given_rows(program, hidden, dtype, number, layers, scale)
    rows = PictureInput(given_columns(hidden, layers), dtype)
    pad = kind.pad_token  # which layers that embed tokens too take for pictures
    token = pad if pad is not None and 0 <= pad < kind.vocab_size else 0
    return PictureSteps(NativePlan(program, plan.experts), rows, token, layers, numbers)


def _with_numbers(program: PlacedProgram, numbers: TokenNumbers, base: Any, number: int) -> PlacedProgram:
    """Returns a program that reads numbers of each token as a further input, by its number.

    Raises:
        ValueError: the program has no place for them.
    """
    if isinstance(numbers, RotaryPositions):
        if not {"rope", "rope_table", "attention"} & set(program.opcodes):
            return program  # of a stage of recurrent layers
        return with_rotary_axes(program, rotary_axes(base.language_model, program), number)
    assert isinstance(numbers, LaterTokens)
    return with_later_tokens(program, number, numbers.only_windows)
