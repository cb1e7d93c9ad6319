"""Structured outputs: sequences that match a JSON schema, a regular expression or a grammar, by llguidance.

A grammar tells before every token which ones may follow.  llguidance (Moskal et al., "Guidance", MIT license)
works on the tokenizer's bytes, so that a token may cross the borders of a grammar's words.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence as GenericSequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling_params import StructuredOutputsParams

_KEPT = 64  # grammars that were read and are likely to come again


class StructuredOutputs:
    """Grammars over one tokenizer, which is read when the first request needs it (about a second).

    Args:
        tokenizer: transformers' fast one.
        vocab_size: columns of the logits.
        eos_token_ids: may be drawn where the text is complete, and nowhere else.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: GenericSequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(eos_token_ids)
        self._read: Any = None
        self._grammars: dict[str, Any] = {}

    def check(self, params: StructuredOutputsParams) -> None:
        """Reads what a request asks for.

        Raises:
            ValueError: it cannot be followed; the message is llguidance's.
            ImportError: llguidance is not installed.
        """
        self._prototype(params)

    def matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Follows one sequence; errors are those of `check`."""
        return GrammarMatcher(
            self._prototype(params).deep_copy(), self._llm_tokenizer(), self._vocab_size, self._end_token_ids
        )

    def _prototype(self, params: StructuredOutputsParams) -> Any:
        tokenizer = self._llm_tokenizer()
        from llguidance import LLMatcher

        grammar = _grammar(params)
        if grammar not in self._grammars:
            fault, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
            made = None if fault else LLMatcher(tokenizer, grammar, log_level=0)
            if made is None or made.is_error():
                raise ValueError(f"structured outputs: {messages[0] if made is None else made.get_error()}")
            while len(self._grammars) >= _KEPT:
                del self._grammars[next(iter(self._grammars))]
            self._grammars[grammar] = made
        return self._grammars[grammar]

    def _llm_tokenizer(self) -> Any:
        if self._read is None:
            try:
                import llguidance.hf
            except ImportError as missing:
                raise ImportError(
                    "structured outputs need llguidance: pip install torch_armllm[structured]"
                ) from missing
            from transformers import PreTrainedTokenizerFast

            if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
                raise ValueError(
                    f"structured outputs need a fast tokenizer; this is a {type(self._tokenizer).__name__}"
                )
            ends = self._end_token_ids or None
            self._read = llguidance.hf.from_tokenizer(self._tokenizer, eos_token=ends)
        return self._read


def _grammar(params: StructuredOutputsParams) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    if params.json is not None:
        schema = params.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as fault:
                raise ValueError(f"structured outputs: the schema is no JSON: {fault}") from fault
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if params.json_object:
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}))
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        return str(grammar_from("choice", json.dumps(params.choice)))
    assert params.grammar is not None
    return str(LLMatcher.grammar_from_lark(params.grammar))


class GrammarMatcher:
    """Where a sequence stands in its grammar.

    It follows the sequence's own tokens, so that a sequence may be preempted, or drafts dropped, at any time.
    """

    def __init__(
        self, matcher: Any, tokenizer: Any, vocab_size: int, eos_token_ids: GenericSequence[int]
    ) -> None:
        self._matcher = matcher
        self._count = 0
        self._astray = False
        self._bits = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._forbidden = np.ones(vocab_size, dtype=np.bool_)
        self._ends = list(eos_token_ids)

    def forbidden(self, sequence: Sequence, prefix: GenericSequence[int]) -> Tensor | None:
        """Which tokens may not follow the sequence and ``prefix``.

        Returns:
            bool ``(V,)``, valid until the next call; None where the grammar forbids ``prefix``, so that
            nothing will be drawn there.
        """
        new = sequence.token_ids[sequence.prompt_length + self._count :]
        self._count += len(new)
        self._astray = self._astray or self._matcher.try_consume_tokens(new) < len(new)
        if self._astray:
            return self._only_ends()
        taken = self._matcher.try_consume_tokens(list(prefix)) if prefix else 0
        forbidden = self._mask() if taken == len(prefix) else None
        if taken:
            self._matcher.rollback(taken)
        return forbidden

    def _mask(self) -> Tensor:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            warnings.warn(f"a structured output ends: {self._matcher.get_error()}", stacklevel=2)
            self._astray = True
            return self._only_ends()
        known = min(self._forbidden.size, 32 * self._bits.size)
        bits = np.unpackbits(self._bits.view(np.uint8), count=known, bitorder="little")
        np.equal(bits, 0, out=self._forbidden[:known])
        return torch.from_numpy(self._forbidden)

    def _only_ends(self) -> Tensor:
        """Behind a token that the grammar does not know, such as a stop token of the request's own."""
        self._forbidden[:] = True
        self._forbidden[self._ends] = False
        return torch.from_numpy(self._forbidden)
