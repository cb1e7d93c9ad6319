"""Tokens by which model families fill in the middle of code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FimTokens:
    """Tokens of a prompt that asks for the middle of a text.

    Attributes:
        prefix: before the text that precedes the middle.
        suffix: before the text that follows the middle.
        middle: at the end of the prompt; None: the prompt ends with the prefix, which then comes last.
        repository: before the repository's name, in front of other files; None: there is none.
        file: before a file's name, for each file; None: there is none.
        ends: other tokens that end a middle, besides those above.
    """

    prefix: str
    suffix: str
    middle: str | None
    repository: str | None = None
    file: str | None = None
    ends: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Tokens without which a model is of another family."""
        return tuple(token for token in (self.prefix, self.suffix, self.middle) if token is not None)


FIM_FAMILIES: Mapping[str, FimTokens] = {
    "Qwen2.5-Coder and CodeGemma": FimTokens(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>",
        ("<|fim_pad|>", "<|endoftext|>", "<|file_separator|>"),
    ),
    "StarCoder": FimTokens(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>",
        ("<fim_pad>", "<|endoftext|>", "<filename>"),
    ),
    "DeepSeek-Coder": FimTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "CodeLlama": FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    "Codestral": FimTokens("[PREFIX]", "[SUFFIX]", None),
    "GLM-4": FimTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),
}  # fmt: skip
"""By the families that introduced them; StarCoder's are those of Granite's code models, too."""


def find_fim_tokens(vocabulary: Mapping[str, int]) -> FimTokens | None:
    """Returns a model's tokens; None if its vocabulary has none.

    Args:
        vocabulary: ids of all tokens of the tokenizer.
    """
    families = FIM_FAMILIES.values()
    return next((tokens for tokens in families if all(each in vocabulary for each in tokens.needed)), None)
