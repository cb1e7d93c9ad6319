"""Prompts that ask for the middle of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch_armllm.server.infill.families import FimTokens, find_fim_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "☺"
"""CodeLlama's own: SentencePiece puts a space before a text, but a suffix goes on where the middle ends."""
_REPOSITORY = "myproject\n"
_CURRENT_FILE = "filename\n"
"""Names that llama.cpp writes for what a request leaves unnamed."""
_SNIPPET = "\n\n--- snippet ---\n\n"


class ExtraFile(NamedTuple):
    """A file, or a part of one, that helps to write the middle."""

    name: str
    text: str


class InfillPrompts:
    """Builds prompts from the tokens of a model's vocabulary.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        tokens: the model's tokens; None: it cannot fill in.
        end_ids: tokens that end a middle.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.get_vocab()
        self.tokens = find_fim_tokens(self._ids)
        self.end_ids = [] if self.tokens is None else self._end_ids(self.tokens)

    def _end_ids(self, tokens: FimTokens) -> list[int]:
        ends = (*tokens.needed, tokens.repository, tokens.file, *tokens.ends)
        return [self._ids[token] for token in ends if token in self._ids]

    def build(
        self, prefix: str, suffix: str, extra: Sequence[ExtraFile] = (), begun: str = "", most: int = 1 << 62
    ) -> list[int]:
        """Returns the tokens of a prompt.

        Args:
            prefix: text before the middle.
            suffix: text after it.
            extra: other files, of which the first are left out if they do not fit.
            begun: beginning of the middle.
            most: tokens that the prompt may have, if leaving out files achieves it.
        """
        tokens = self.tokens
        assert tokens is not None
        before = [self._ids[tokens.prefix], *self._encode(prefix)]
        after = [self._ids[tokens.suffix], *self._encode_suffix(suffix)]
        middle = [] if tokens.middle is None else [self._ids[tokens.middle]]
        prompt = before + after + middle if middle else after + before
        prompt += self._encode_suffix(begun) if begun else []
        room = most - len(prompt) - len(self._bos())
        return self._bos() + self._files(tokens, extra, room) + prompt

    def _files(self, tokens: FimTokens, extra: Sequence[ExtraFile], room: int) -> list[int]:
        """Returns the tokens of the last files that fit."""
        if not extra:
            return []
        repository, file = self._ids.get(tokens.repository or ""), self._ids.get(tokens.file or "")
        begin = [] if repository is None else [repository, *self._encode(_REPOSITORY)]
        end = [] if file is None else [file, *self._encode(_CURRENT_FILE)]
        kept: list[int] = []
        for each in reversed(extra):
            if file is None:
                added = self._encode(_SNIPPET + each.text)
            else:
                added = [file, *self._encode(f"{each.name}\n{each.text}")]
            if len(begin) + len(added) + len(kept) + len(end) > room:
                break
            kept = added + kept
        return begin + kept + end if kept else []

    def _bos(self) -> list[int]:
        """Returns the token that begins every text of the model, if there is one."""
        return [i for i in self._tokenizer("")["input_ids"][:1] if i == self._tokenizer.bos_token_id]

    def _encode(self, text: str) -> list[int]:
        """Returns a text's tokens; names of special tokens in it, as code may contain them, are text."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"])

    def _encode_suffix(self, text: str) -> list[int]:
        """Returns the tokens of a text that begins within a line."""
        if not self._tokenizer.tokenize("x")[0].startswith("▁"):
            return self._encode(text)
        mark = self._encode(_MARK)
        return self._encode(_MARK + text)[len(mark) :]
