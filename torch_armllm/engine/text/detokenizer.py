"""Tokens to text, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenizers import decoders

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNREADABLE = "\ufffd"
"""What decoders put in the place of bytes that are no character, or not yet."""
_MOST_BYTES = 4  # of a character
_CONTEXT = 12  # tokens: three unfinished characters in a row can have nine bytes, each a token
_WINDOW = 32  # tokens

Decode = Callable[[list[int]], str]


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> Decode:
    """The fastest way from a list of token ids to the tokenizer's own text of it.

    Spaces are not cleaned up (`clean_up_tokenization_spaces`): that would change text that has been shown.
    """
    from transformers import PreTrainedTokenizerFast

    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    ):
        backend = tokenizer.backend_tokenizer
        return lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


class TokenStrings:
    """What single tokens look like, special ones too; each is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._decode = None if tokenizer is None else decoder(tokenizer, skip_special_tokens=False)
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str | None:
        """A token's own text; None without a tokenizer."""
        if self._decode is None:
            return None
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._decode([token_id])
        return text


class TokenPieces(dict[int, str | None]):
    """The text of tokens that have the same one beside whatever others; None for the rest.

    Where a decoder does nothing but put bytes together, those are the tokens of whole characters.  Each is
    decoded once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        super().__init__()
        self._decode = decoder(tokenizer, skip_special_tokens)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.any = backend is not None and isinstance(backend.decoder, decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text = self._decode([token_id]) if self.any else UNREADABLE
        found = self[token_id] = None if UNREADABLE in text else text
        return found


class Detokenizer:
    """Gives out the text of tokens as it becomes certain.

    A token's text depends on its neighbors: characters are spread over tokens, and the first token of a
    text may lose its space.  So a window of the last tokens is decoded each time, the end of the prompt at
    first, and what it has more than before is new.  Text and prompt, put together, are what the tokenizer
    makes of all tokens; where the prompt is empty the text is what it makes of the sequence's.

    Args:
        tokenizer: whose tokens come.
        prompt_token_ids: what stands before the first one.
        skip_special_tokens: leaves special tokens out.
        pieces: of this tokenizer, with special tokens left out or not; None: all tokens are decoded.
    """

    __slots__ = ("_decode", "_late", "_pending", "_pieces", "_shown", "_window")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        pieces: TokenPieces | None = None,
    ) -> None:
        self._decode = decoder(tokenizer, skip_special_tokens)
        self._pieces = pieces if pieces is not None and pieces.any else None
        self._late: list[int] = []  # tokens whose text was given out, and that the window does not have yet
        prompt = list(prompt_token_ids[-_WINDOW:])
        self._window, self._shown = self._context(prompt)
        self._pending = 0  # tokens behind the last one whose text was given out entirely
        for unfinished in range(1, _MOST_BYTES):  # the prompt may end within a character
            if self._shown.endswith(UNREADABLE):
                window, text = self._context(prompt[:-unfinished])
                if not text.endswith(UNREADABLE):
                    self._window, self._shown = window + prompt[-unfinished:], text
                    self._pending = unfinished

    def append(self, token_id: int) -> str:
        """Takes a token and returns the text that is certain now and was not before."""
        if self._pieces is not None and not self._pending:
            piece = self._pieces[token_id]
            if piece is not None:
                self._late.append(token_id)
                return piece
        self._catch_up()
        self._window.append(token_id)
        self._pending += 1
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            if text.endswith(UNREADABLE) and self._pending < _MOST_BYTES:
                return (
                    ""  # byte tokens of a sentencepiece model: a whole run is unreadable until its last byte
                )
            text = self._restart()
        open_end = text[-_MOST_BYTES + 1 :]
        certain = len(text) - (len(open_end) - len(open_end.rstrip(UNREADABLE)))
        new = text[len(self._shown) : certain]
        self._shown += new
        if len(self._shown) == len(text):
            self._pending = 0
        if len(self._window) >= _WINDOW:
            self._shrink(len(text) - len(self._shown))
        return new

    def flush(self) -> str:
        """The text that was held back because its last character is not complete."""
        self._catch_up()
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            text = self._restart()
        rest = text[len(self._shown) :]
        self._shown, self._pending = text, 0
        return rest

    def _catch_up(self) -> None:
        if self._late:
            self._window, self._shown = self._context(self._window + self._late)
            self._late.clear()

    def _restart(self) -> str:
        """Leaves the shown tokens out: with a byte that fits nowhere their whole run became unreadable."""
        self._window = self._window[-self._pending :]
        self._shown = ""
        return self._decode(self._window)

    def _shrink(self, held: int) -> None:
        self._window, text = self._context(self._window)
        self._shown = text[: max(0, len(text) - held)]
        self._pending = min(self._pending, len(self._window))

    def _context(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """The last few tokens, and their text: some, and beginning with a whole character if that can be."""
        for count in range(_CONTEXT, _WINDOW):
            window = list(ids[-count:])
            text = self._decode(window)
            if count >= len(ids) or (text and not text.startswith(UNREADABLE)):
                return window, text
        window = list(ids[-_CONTEXT:])
        return window, self._decode(window)
