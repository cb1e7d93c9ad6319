"""Stop conditions of a sequence, and the text that is safe to output before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch_armllm.engine.outputs import FinishReason
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.detokenizer import Detokenizer, TokenPieces
from torch_armllm.engine.text.stop_matcher import StopMatcher

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


class Finish(NamedTuple):
    """Finish reason of a sequence; see `CompletionOutput`."""

    reason: FinishReason
    stop_reason: int | str | None = None


def find_eos_token_ids(
    tokenizer: PreTrainedTokenizerBase | None, generation: GenerationConfig | None
) -> tuple[int, ...]:
    """Returns a model's EOS tokens: the tokenizer's first, then those of the generation config."""
    ids: list[int] = []
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    configured = generation.eos_token_id if generation is not None else None
    if configured is not None:
        ids += [configured] if isinstance(configured, int) else configured
    return tuple(dict.fromkeys(ids))


class OutputText:
    """Output text of one sequence, and its stop conditions.

    Text that may be the beginning of a stop string is held back until it turns out not to be.  Without stop
    strings, tokens are detokenized only when the text is read.

    Args:
        tokenizer: None: no text; only tokens and lengths stop the sequence.
        params: of the request.
        prompt_token_ids: of the request.
        eos_token_ids: of the model; see `find_eos_token_ids`.
        max_model_len: most tokens of prompt and output.
        pieces: of the tokenizer, with special tokens (first) and without; see `TokenPieces`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        max_model_len: int,
        pieces: tuple[TokenPieces, TokenPieces] | None = None,
    ) -> None:
        self._params = params
        self._stops = [(stop, StopMatcher(stop)) for stop in params.stop_strings]
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos = None if params.ignore_eos or not eos_token_ids else eos_token_ids[0]
        self._end_ids = self._stop_ids if params.ignore_eos else self._stop_ids | frozenset(eos_token_ids)
        room = max_model_len - len(prompt_token_ids)
        self._max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            skip = params.skip_special_tokens
            own_pieces = None if pieces is None else pieces[skip]
            self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip, own_pieces)
        self._find_end = None
        if params.text_end is not None and self._detokenizer is not None:
            self._find_end = params.text_end.begin()
        self._end: int | None = None
        self._length = 0
        self._unread: list[int] = []  # tokens that are not detokenized yet
        self._text = ""  # all text, the held-back part included
        self._released = 0  # characters that may be output
        self._searched = 0  # characters that were searched for stop strings

    def append(self, token_id: int) -> Finish | None:
        """Adds the next token; returns how the sequence finishes with it, if it does."""
        assert self._length < self._max_tokens, "the sequence has finished"
        self._length += 1
        ends = token_id in self._end_ids and self._length >= self._params.min_tokens
        if self._detokenizer is not None and not (ends and not self._params.include_stop_str_in_output):
            self._unread.append(token_id)
        if self._find_end is not None:
            self._seek_end()
        if self._stops:
            self._read()
            if self._length <= self._params.min_tokens:
                self._skip_stops()
        if ends:
            is_eos = token_id == self._eos and token_id not in self._stop_ids
            return self._finish(Finish("stop", None if is_eos else token_id))
        if self._stops and (stop := self._find_stop()) is not None:
            return Finish("stop", stop)
        if self._end is not None and self._length >= self._params.min_tokens:
            self._text, self._released = self._text[: self._end], self._end
            return Finish("stop")
        if self._length == self._max_tokens:
            return self._finish(Finish("length"))
        if self._stops or self._find_end is not None:
            self._released = len(self._text) - self._held_back()
        return None

    @property
    def text(self) -> str:
        """The text that may be output."""
        return self.since(0)

    @property
    def length(self) -> int:
        """Characters of the text that may be output."""
        if self._unread:
            self._read()
            self._released = len(self._text)
        return self._released

    def since(self, begin: int) -> str:
        """Returns the text that may be output, from a character on; no more than that is copied."""
        end = self.length
        return self._text if not begin and end == len(self._text) else self._text[begin:end]

    def flush(self) -> str:
        """Releases held-back text at the end of a sequence; returns the whole text."""
        self._read()
        if self._detokenizer is not None:
            self._text += self._detokenizer.flush()
        self._released = len(self._text)
        return self._text

    def _read(self) -> None:
        assert self._detokenizer is not None or not self._unread
        # Python appends in place to a text that has one name; under an attribute each time were a copy
        text, self._text = self._text, ""
        try:
            for token in self._unread:
                text += self._detokenizer.append(token)  # type: ignore[union-attr]
        finally:
            self._text = text
        self._unread.clear()

    def _finish(self, finish: Finish) -> Finish:
        self.flush()
        return finish

    def _seek_end(self) -> None:
        """Reads the new text, and finds the end in it."""
        before = len(self._text)
        self._read()
        if self._end is None and len(self._text) > before:
            assert self._find_end is not None
            self._end = self._find_end(self._text[before:])

    def _find_stop(self) -> str | None:
        """Returns the first stop string in the text and truncates the text there."""
        first: tuple[int, str] | None = None
        for stop, matcher in self._stops:
            if (end := matcher.find(self._text, self._searched)) is not None:
                position = end - len(stop)
                if first is None or position < first[0]:
                    first = position, stop
        self._searched = len(self._text)
        if first is None:
            return None
        position, stop = first
        end = position + len(stop) if self._params.include_stop_str_in_output else position
        self._text = self._text[:end]
        self._released = end
        return stop

    def _skip_stops(self) -> None:
        """Ignores stop strings that end within the text so far."""
        for _, matcher in self._stops:
            at: int | None = self._searched
            while at is not None:
                at = matcher.find(self._text, at)
        self._searched = len(self._text)

    def _held_back(self) -> int:
        """Returns the number of last characters that may be the beginning of a stop string."""
        if self._params.include_stop_str_in_output:
            return 0
        return max((matcher.matched for _, matcher in self._stops), default=0)


def output_texts(
    tokenizer: PreTrainedTokenizerBase | None, eos_token_ids: Sequence[int], max_model_len: int
) -> Callable[[Request], OutputText]:
    """Returns a function that begins the output text of a sequence of a request; see `OutputText`."""
    pieces = None if tokenizer is None else (TokenPieces(tokenizer, False), TokenPieces(tokenizer, True))

    def begin(request: Request) -> OutputText:
        prompt = request.prompt_token_ids
        return OutputText(tokenizer, request.params, prompt, eos_token_ids, max_model_len, pieces)

    return begin
