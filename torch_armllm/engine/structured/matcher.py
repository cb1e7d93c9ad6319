"""Structured outputs: outputs that match a JSON schema, a regular expression or a grammar, by llguidance.

Before every token, the grammar yields a mask of the tokens that may follow.  llguidance (Moskal et al.,
"Guidance", MIT license) works on the tokenizer's bytes, so a token may span several terminals of a grammar.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence as GenericSequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.engine.structured.grammar_text import grammar_text
from torch_armllm.system.deep_stack import call_on_deep_stack
from torch_armllm.system.extras import install_command
from torch_armllm.system.panics import PANICS_AS_ERRORS

_MAX_GRAMMARS = 64  # compiled grammars that are cached
_MAX_CACHED_TEXT = 1 << 17
"""Characters of the cached grammars: each takes up to 250 bytes of memory once it is compiled."""
_MAX_REASON = 500  # characters of an error


class StructuredOutputs:
    """Compiled grammars for one tokenizer, which is loaded at the first request (about a second).

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of columns of the logits.
        eos_token_ids: allowed only after a complete output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: GenericSequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(eos_token_ids)
        self._loaded: Any = None
        self._grammars: dict[str, Any] = {}
        self._lock = threading.Lock()  # requests are checked on threads of their own

    @PANICS_AS_ERRORS
    def check(self, params: StructuredOutputsParams) -> None:
        """Compiles the grammar of a request.

        Raises:
            ValueError: the grammar is unsupported; the message is llguidance's.
            ImportError: llguidance is not installed.
        """
        self._prototype(params)

    def matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Returns a matcher for one sequence; errors are those of `check`."""
        return GrammarMatcher(
            self._prototype(params).deep_copy(), self._llm_tokenizer(), self._vocab_size, self._end_token_ids
        )

    def _prototype(self, params: StructuredOutputsParams) -> Any:
        tokenizer = self._llm_tokenizer()
        grammar = grammar_text(params, self._tokenizer)
        with self._lock:
            matcher = self._grammars.get(grammar)
        if matcher is None:
            matcher = call_on_deep_stack(_compile, grammar, tokenizer)
        with self._lock:
            self._grammars.pop(grammar, None)
            self._grammars[grammar] = matcher  # the last to be evicted
            while len(self._grammars) > 1 and (
                len(self._grammars) > _MAX_GRAMMARS or sum(map(len, self._grammars)) > _MAX_CACHED_TEXT
            ):
                del self._grammars[next(iter(self._grammars))]
        return matcher

    def _llm_tokenizer(self) -> Any:
        if self._loaded is None:
            try:
                import llguidance.hf
            except ImportError as missing:
                raise ImportError(
                    f"structured outputs need llguidance: {install_command('structured')}"
                ) from missing
            from transformers import PreTrainedTokenizerFast

            if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
                raise ValueError(
                    f"structured outputs need a fast tokenizer; this is a {type(self._tokenizer).__name__}"
                )
            ends = self._end_token_ids or None
            self._loaded = llguidance.hf.from_tokenizer(self._tokenizer, eos_token=ends)
        return self._loaded


def _compile(grammar: str, tokenizer: Any) -> Any:
    """Returns a matcher for a grammar; llguidance recurses a few kilobytes of stack for each rule."""
    from llguidance import LLMatcher

    error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    matcher = None if error else LLMatcher(tokenizer, grammar, log_level=0)
    if matcher is None or matcher.is_error():
        reason = messages[0] if matcher is None else matcher.get_error()
        raise ValueError(f"structured outputs: {_first_line(reason)}")
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise ValueError(
            f"structured outputs: no text matches the format; it may refer to itself without an end "
            f"({_first_line(first.get_error())})"
        )
    return matcher


def _first_line(reason: str) -> str:
    """Returns an error without a library's backtrace and without the input that it repeats."""
    line = next((line for line in reason.splitlines() if line.strip()), "unknown error")
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]} …"


class GrammarMatcher:
    """Position of one sequence in its grammar.

    It reads the sequence's own tokens, so a sequence may be preempted, or its drafts dropped, at any time.
    """

    def __init__(
        self, matcher: Any, tokenizer: Any, vocab_size: int, eos_token_ids: GenericSequence[int]
    ) -> None:
        self._matcher = matcher
        self._count = 0
        self._off_grammar = False
        self._bits = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._forbidden = np.ones(vocab_size, dtype=np.bool_)
        self._eos = list(eos_token_ids)

    def forbidden(self, sequence: Sequence, prefix: GenericSequence[int]) -> Tensor:
        """Returns the tokens that may not follow the sequence and ``prefix``.

        Returns:
            bool ``(V,)``, valid until the next call.  All but EOS after a prefix outside of the grammar: a
            draft may continue an output that is complete, with EOS repeated by a request that ignores it.
        """
        new = sequence.token_ids[sequence.prompt_length + self._count :]
        self._count += len(new)
        if not self._off_grammar and self._matcher.try_consume_tokens(new) < len(new):
            self._leave()
        if self._off_grammar:
            return self._only_eos()
        consumed = self._matcher.try_consume_tokens(list(prefix)) if prefix else 0
        forbidden = self._mask() if consumed == len(prefix) else self._only_eos()
        if consumed:
            self._matcher.rollback(consumed)
        return forbidden

    def _mask(self) -> Tensor:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            self._leave()
            return self._only_eos()
        num_tokens = min(self._forbidden.size, 32 * self._bits.size)
        bits = np.unpackbits(self._bits.view(np.uint8), count=num_tokens, bitorder="little")
        np.equal(bits, 0, out=self._forbidden[:num_tokens])
        return torch.from_numpy(self._forbidden)

    def _leave(self) -> None:
        """Leaves the grammar, at a token that is outside of it, or an error such as a limit of llguidance."""
        if self._matcher.is_error():
            warnings.warn(f"a structured output ends: {_first_line(self._matcher.get_error())}", stacklevel=3)
        self._off_grammar = True

    def _only_eos(self) -> Tensor:
        """Allows EOS only: after a token outside of the grammar, such as the request's own stop token."""
        self._forbidden[:] = True
        self._forbidden[self._eos] = False
        return torch.from_numpy(self._forbidden)
