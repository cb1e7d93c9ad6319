"""Upper bound of a prompt's characters, checked before it is tokenized."""

from __future__ import annotations

from typing import Any


class PromptLimit:
    """Refuses texts that have more tokens than a model allows, whatever they consist of.

    No token stands for more characters than the longest entry of the vocabulary has.  Tokenizing a text of
    megabytes to learn that it is too long takes seconds.

    Args:
        tokenizer: of the model.
        max_model_len: most tokens of prompt and output.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        longest = max(map(len, vocabulary), default=0)
        self.max_characters = max_model_len * longest if longest else None

    def check(self, characters: int) -> None:
        """Raises ValueError for a text with too many characters."""
        if self.max_characters is not None and characters > self.max_characters:
            raise ValueError(
                f"the prompt has {characters} characters; with max_model_len = {self.max_model_len}, none of "
                f"more than {self.max_characters} fits: shorten it"
            )
