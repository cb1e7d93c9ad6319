"""Builds the reader of a model's pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_armllm.engine.pictures.picture_input import PictureInput
from torch_armllm.engine.pictures.picture_steps import PictureSteps
from torch_armllm.engine.pictures.reader import PictureReader
from torch_armllm.engine.pictures.rotary_axes import rotary_axes
from torch_armllm.engine.pictures.token_numbers import LaterTokens, RotaryPositions, TokenNumbers
from torch_armllm.patching.forward import PatchedForward
from torch_armllm.patching.state import is_patched, patched_forward
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.picture_inputs import (
    given_columns,
    input_after,
    with_given_rows,
    with_later_tokens,
    with_rotary_axes,
)
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.plan.program import Encoded

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
    name = type(model).__name__
    if isinstance(model, PlanModel):
        return f"{model.name} came from the plan cache, which keeps no vision towers: set ARMLLM_PLAN_CACHE=0"
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    tower = getattr(config, "vision_config", None)
    if tower is None:
        return f"{name} takes no pictures: it is a model of text"
    if kind not in FAMILIES:
        return f"{name} is served for text only: only pictures of {', '.join(FAMILIES)} are known"
    if limit == 0:
        return "limit_mm_per_prompt allows no pictures"
    if processor is None:
        return f"{name} is served for text only: its files have no processor, or Pillow is missing ([vision])"
    forward = patched_forward(model) if is_patched(model) else None
    if forward is None or not isinstance(forward.plan, NativePlan):
        return f"{name} is served for text only: it has no native plan"
    try:
        steps = _steps(forward, _numbers(kind, config), tower)
    except ValueError as reason:
        return f"{name} is served for text only: {reason}"
    base: Any = forward.base
    named = next((part for part in _TOWERS if hasattr(base, part)), None)
    if named is None:  # Llama 4: its base model is that of its language model
        base, named = model, next((part for part in _TOWERS if hasattr(model, part)), None)
    from torch_armllm.engine.pictures.tower import plan_tower

    layers = None if named is None else plan_tower(getattr(base, named), config)
    own = forward.module_forward if base is forward.base else model.forward
    return PictureReader(base, own, processor, steps, limit, tokens, layers)


def _numbers(kind: str, config: Any) -> TokenNumbers | None:
    """Returns the numbers of each token that the plan of a model reads beside its id."""
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        return LaterTokens(only_windows=True)
    make = FAMILIES[kind]
    return None if make is None else make()


def _steps(forward: PatchedForward, numbers: TokenNumbers | None, tower: Any) -> PictureSteps:
    """Returns the plan of a model with the inputs that pictures need.

    Raises:
        ValueError: it has no place for one of them.
    """
    plan = forward.plan
    base: Any = forward.base
    assert isinstance(plan, NativePlan)
    program, number = plan.program, input_after(forward.shape.tensors(0), len(forward.shape.states.groups))
    if numbers is not None:
        program, number = _with_numbers(program, numbers, base, number), number + 1
    layers = len(getattr(tower, "deepstack_visual_indexes", None) or ())
    scale = float(getattr(base.get_input_embeddings(), "embed_scale", 1.0))
    config = base.config.get_text_config()
    hidden, dtype = int(config.hidden_size), program.dtype
    program = with_given_rows(program, hidden, dtype, number, layers, scale)
    rows = PictureInput(given_columns(hidden, layers), dtype)
    pad = getattr(config, "pad_token_id", None)  # which layers that embed tokens too take for pictures
    token = pad if pad is not None and 0 <= pad < forward.vocab_size else 0
    return PictureSteps(NativePlan(program, plan.experts), rows, token, layers, numbers)


def _with_numbers(program: Encoded, numbers: TokenNumbers, base: Any, number: int) -> Encoded:
    """Returns a program that reads numbers of each token as a further input, by its number.

    Raises:
        ValueError: the program has no place for them.
    """
    if isinstance(numbers, RotaryPositions):
        return with_rotary_axes(program, rotary_axes(base.language_model, program), number)
    assert isinstance(numbers, LaterTokens)
    return with_later_tokens(program, number, numbers.only_windows)
