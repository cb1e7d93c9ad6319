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


def reasoning_tags(name: str | None, template: str, vocabulary: Collection[str]) -> ReasoningTags | None:
    """Returns the tags of a model's reasoning; None if it has none.

    Args:
        name: a name of `REASONING_PARSERS`, or ``none``; None: found by the template and the vocabulary.
        template: the chat template.
        vocabulary: all tokens of the tokenizer.
    """
    if name is not None:
        return REASONING_PARSERS.get(name)
    for tags in REASONING_PARSERS.values():
        both = tags.begin, tags.end
        if any(tag in template for tag in both) or all(tag in vocabulary for tag in both):
            return tags
    return None
