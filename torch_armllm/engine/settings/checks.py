"""Checks of engine settings that hold others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch_armllm.engine.media.taken_media import MODALITIES
from torch_armllm.engine.text.reasoning_tags import parser_of
from torch_armllm.system.settings import COUNT

_REASONING = ("reasoning_start_str", "reasoning_end_str", "reasoning_parser")


def are_drafts(value: Any) -> bool:
    """True for settings of speculative decoding, or ``auto``."""
    return isinstance(value, Mapping) or (isinstance(value, str) and value == "auto")


def is_trace(value: Any) -> bool:
    """True for a path, or a track of a file."""
    return isinstance(value, (str, os.PathLike)) or hasattr(value, "begin")


def is_list(value: Any) -> bool:
    """True for a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def has_media_limits(value: Any) -> bool:
    """True for limits of what prompts may hold."""
    return isinstance(value, Mapping) and not set(value) - set(MODALITIES)


def check_limits(limits: Mapping[str, Any]) -> None:
    """Checks the numbers of ``limit_mm_per_prompt``."""
    for value in limits.values():
        COUNT.within(0, None).check("limit_mm_per_prompt", value)


def check_policy(policy: Any) -> None:
    """Checks that ``scheduling_policy`` orders requests."""
    if not hasattr(policy, "sort_key"):
        raise TypeError(f"scheduling_policy = {policy!r} has no method sort_key")


def check_reasoning(settings: Any) -> None:
    """Checks the entries of ``reasoning_config``."""
    if not isinstance(settings, Mapping) or set(settings) - set(_REASONING):
        raise TypeError(f"reasoning_config = {settings!r}: give a dict of {', '.join(_REASONING)}")
    for name, text in settings.items():
        if not isinstance(text, str) or not text:
            raise TypeError(f"reasoning_config: {name} is {text!r}; give a text")
    try:
        parser_of(settings.get("reasoning_parser"))
    except ValueError as error:
        raise ValueError(f"reasoning_config: reasoning_parser {error}") from error
