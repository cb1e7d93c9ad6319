"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenizers import decoders

from torch_armllm.system.panics import PANICS_AS_ERRORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNREADABLE = "\ufffd"
"""Replacement character that decoders emit for incomplete or invalid UTF-8."""
_MAX_CHAR_BYTES = 4
_CONTEXT = 12  # tokens; three unfinished characters in a row can be nine bytes, each a token
_WINDOW = 32  # tokens

Decode = Callable[[list[int]], str]


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> Decode:
    """Returns the fastest decode function whose text is that of the tokenizer.

    It does not clean up spaces (`clean_up_tokenization_spaces`): that would change text that was already
    output.
    """
    from transformers import PreTrainedTokenizerFast

    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    ):
        backend = tokenizer.backend_tokenizer
        return PANICS_AS_ERRORS(lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens)))
    return PANICS_AS_ERRORS(
        lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )
    )


class TokenStrings:
    """Strings of single tokens, special tokens included; each is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._decode = None if tokenizer is None else decoder(tokenizer, skip_special_tokens=False)
        self._strings: dict[int, str] = {}

    def __call__(self, token_id: int) -> str | None:
        """Returns a token's string; None without a tokenizer."""
        if self._decode is None:
            return None
        text = self._strings.get(token_id)
        if text is None:
            text = self._strings[token_id] = self._decode([token_id])
        return text


class TokenPieces(dict[int, str | None]):
    """Text of tokens whose text does not depend on their neighbors; None for all others.

    For byte-level decoders, these are the tokens that consist of whole characters.  Each is decoded once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        super().__init__()
        self._decode = decoder(tokenizer, skip_special_tokens)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.any = backend is not None and isinstance(backend.decoder, decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text = self._decode([token_id]) if self.any else UNREADABLE
        piece = self[token_id] = None if UNREADABLE in text else text
        return piece


class Detokenizer:
    """Converts tokens to text incrementally and outputs text once it is final.

    A token's text depends on its neighbors: characters may span tokens, and the first token of a text may
    lose its space.  So each call decodes a window of the last tokens, at first the end of the prompt, and
    outputs what the window's text has gained.  Prompt and output text together equal the tokenizer's text of
    all tokens; with an empty prompt, the output text equals the tokenizer's text of the output tokens.

    Args:
        tokenizer: decodes the tokens.
        prompt_token_ids: tokens before the first output token.
        skip_special_tokens: leaves special tokens out.
        pieces: of this tokenizer, with the same ``skip_special_tokens``; None: every token is decoded in its
            window.
    """

    __slots__ = ("_decode", "_late", "_pending", "_pieces", "_emitted", "_window")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        pieces: TokenPieces | None = None,
    ) -> None:
        self._decode = decoder(tokenizer, skip_special_tokens)
        self._pieces = pieces if pieces is not None and pieces.any else None
        self._late: list[int] = []  # tokens whose text was output, not in the window yet
        prompt = list(prompt_token_ids[-_WINDOW:])
        self._window, self._emitted = self._context(prompt)
        self._pending = 0  # tokens after the last one with complete output
        for unfinished in range(1, _MAX_CHAR_BYTES):  # the prompt may end within a character
            if self._emitted.endswith(UNREADABLE):
                window, text = self._context(prompt[:-unfinished])
                if not text.endswith(UNREADABLE):
                    self._window, self._emitted = window + prompt[-unfinished:], text
                    self._pending = unfinished

    def append(self, token_id: int) -> str:
        """Adds a token and returns the text that became final."""
        if self._pieces is not None and not self._pending:
            piece = self._pieces[token_id]
            if piece is not None:
                self._late.append(token_id)
                return piece
        self._catch_up()
        self._window.append(token_id)
        self._pending += 1
        text = self._decode(self._window)
        if not text.startswith(self._emitted):
            if text.endswith(UNREADABLE) and self._pending < _MAX_CHAR_BYTES:
                return ""  # a run of SentencePiece byte tokens is unreadable until its last byte
            text = self._restart()
        held = len(text) - len(text.rstrip(UNREADABLE))
        if (
            self._pending >= _MAX_CHAR_BYTES
        ):  # before that, a run of byte tokens may become readable as a whole
            held = min(held, _MAX_CHAR_BYTES - 1)
        new = text[len(self._emitted) : len(text) - held]
        self._emitted += new
        if len(self._emitted) == len(text):
            self._pending = 0
        if len(self._window) >= _WINDOW:
            self._shrink(len(text) - len(self._emitted))
        return new

    def flush(self) -> str:
        """Returns the text that was held back because its last character is incomplete."""
        self._catch_up()
        text = self._decode(self._window)
        if not text.startswith(self._emitted):
            text = self._restart()
        rest = text[len(self._emitted) :]
        self._emitted, self._pending = text, 0
        return rest

    def _catch_up(self) -> None:
        if self._late:
            self._window, self._emitted = self._context(self._window + self._late)
            self._late.clear()

    def _restart(self) -> str:
        """Drops the output tokens from the window: an invalid byte made their whole run unreadable."""
        self._window = self._window[-self._pending :]
        self._emitted = ""
        return self._decode(self._window)

    def _shrink(self, held: int) -> None:
        self._window, text = self._context(self._window)
        self._emitted = text[: max(0, len(text) - held)]
        self._pending = min(self._pending, len(self._window))

    def _context(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Returns the last tokens and their text, which begins with a whole character if possible."""
        for count in range(_CONTEXT, _WINDOW):
            window = list(ids[-count:])
            text = self._decode(window)
            if count >= len(ids) or (text and not text.startswith(UNREADABLE)):
                return window, text
        window = list(ids[-_CONTEXT:])
        return window, self._decode(window)
