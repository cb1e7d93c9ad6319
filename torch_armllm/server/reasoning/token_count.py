"""Number of tokens of the reasoning in an output."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_armllm.chat_format.format import ReasoningFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reasoning_tokens(
    tokens: Sequence[int], tags: ReasoningFormat, opened: bool, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Returns the number of tokens up to the end of the reasoning, the tags included.

    Args:
        tokens: the output.
        tags: the tags.
        opened: True if the output begins within the reasoning.
        tokenizer: decodes the tokens.
    """

    def text(count: int) -> str:
        return str(tokenizer.decode(tokens[:count], skip_special_tokens=False))

    if not opened and not text(len(tokens)).lstrip().startswith(tags.begin):
        return 0
    return min(len(tokens), bisect_left(range(len(tokens)), True, key=lambda count: tags.end in text(count)))
