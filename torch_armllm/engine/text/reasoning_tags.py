"""Tags of the reasoning of model families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """Texts around a model's reasoning.

    Attributes:
        begin: before the reasoning; at the end of the prompt, or at the beginning of the output.
        end: between the reasoning and the answer.
        implied: True if an output begins with reasoning where neither the prompt nor it has the tag.
    """

    begin: str
    end: str
    implied: bool = False


REASONING_PARSERS: Mapping[str, ReasoningTags] = {
    "qwen3": ReasoningTags("<think>", "</think>"),
    "deepseek_r1": ReasoningTags("<think>", "</think>", implied=True),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "granite": ReasoningTags("Here is my thought process:", "Here is my response:"),
}
"""By vLLM's names; other families that write ``<think>`` are ``qwen3``."""
_ALIASES: Mapping[str, str | None] = {
    **dict.fromkeys(
        (
            *("deepseek_v3", "deepseek_v4", "ernie45", "glm45", "glm47", "hunyuan_a13b", "kimi_k2", "mimo"),
            "nemotron_v3",
        ),
        "qwen3",
    ),
    **dict.fromkeys(("holo2", "minimax_m2", "olmo3", "step3", "step3p5"), "deepseek_r1"),
    **dict.fromkeys(
        (
            *("cohere_command3", "cohere_command4", "gemma4", "gptoss", "hy_v3", "inkling", "kimi_k3"),
            *("minimax_m3", "openai_gptoss", "poolside_v1", "solar_open2"),
        ),
        None,
    ),
    **dict.fromkeys(("identity", "minimax_m2_append_think"), "none"),
}
"""Further names of vLLM's; None: the chat template tells."""
PARSER_NAMES = (*REASONING_PARSERS, *_ALIASES, "none")
"""All names by which reasoning is parted from answers."""


def parser_of(name: str | None) -> str | None:
    """Returns the name of `REASONING_PARSERS`, or ``none``, that a name of vLLM's stands for.

    Args:
        name: one of `PARSER_NAMES`, or None.

    Returns:
        None: the chat template tells.

    Raises:
        ValueError: the name is not known.
    """
    if name is None:
        return None
    if name not in PARSER_NAMES:
        raise ValueError(f"is {name[:50]!r}; give {', '.join(PARSER_NAMES)}")
    return _ALIASES.get(name, name)


def reasoning_tags(name: str | None, template: str, vocabulary: Collection[str]) -> ReasoningTags | None:
    """Returns the tags of a model's reasoning; None if it has none.

    Args:
        name: one of `PARSER_NAMES`; None: found by the template and the vocabulary.
        template: the chat template.
        vocabulary: all tokens of the tokenizer.
    """
    parser = parser_of(name)
    if parser is not None:
        return REASONING_PARSERS.get(parser)
    for tags in REASONING_PARSERS.values():
        both = tags.begin, tags.end
        if any(tag in template for tag in both) or all(tag in vocabulary for tag in both):
            return tags
    return None
