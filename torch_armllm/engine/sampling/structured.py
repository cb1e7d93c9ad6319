"""Structured outputs: outputs that match a JSON schema, a regular expression or a grammar, by llguidance.

Before every token, the grammar yields a mask of the tokens that may follow.  llguidance (Moskal et al.,
"Guidance", MIT license) works on the tokenizer's bytes, so a token may span several terminals of a grammar.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Sequence as GenericSequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling_params import FreeReasoning, StructuredOutputsParams
from torch_armllm.engine.structural_tag import StructuralTag, read_structural_tag
from torch_armllm.engine.structured_limits import check_size, is_gbnf
from torch_armllm.system.deep_stack import call_on_deep_stack
from torch_armllm.system.extras import install_command

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
        grammar = _grammar(params, self._tokenizer)
        if params.reasoning is not None:
            grammar = _after_reasoning(grammar, params.reasoning, self._tokenizer)
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


def _grammar(params: StructuredOutputsParams, tokenizer: Any) -> str:
    """Returns the grammar in llguidance's format."""
    from llguidance import LLMatcher, grammar_from

    space = params.whitespace_pattern
    defaults = None if space is None else {"whitespace_pattern": space}
    if params.json is not None:
        schema = params.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as fault:
                raise ValueError(f"structured outputs: the schema is not valid JSON: {fault}") from fault
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults))
    if params.json_object:
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=defaults))
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        return str(grammar_from("choice", json.dumps(params.choice)))
    if params.structural_tag is not None:
        tag = read_structural_tag(params.structural_tag)
        return str(LLMatcher.grammar_from_lark(_tagged(tag, tokenizer)))
    grammar = params.grammar
    assert grammar is not None
    return str(LLMatcher.grammar_from_lark(_lark(grammar) if is_gbnf(grammar) else grammar))


def _lark(grammar: str) -> str:
    """Converts a grammar from EBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = str(gbnf_to_lark(_UNICODE.sub(_character, grammar)))
    except Exception as fault:  # of its own, and those of Python for what it did not expect
        raise ValueError(f"structured outputs: the grammar is no EBNF: {fault}") from fault
    check_size("grammar", lark)
    return lark


_UNICODE = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")


def _character(escape: re.Match[str]) -> str:
    """Returns the character of an escape, which llguidance's converter would shorten to an invalid one."""
    digits = escape[1] or escape[2]
    if digits is None or 0xD800 <= (code := int(digits, 16)) < 0xE000 or code > 0x10FFFF:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    return {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def _tagged(tag: StructuralTag, tokenizer: Any) -> str:
    """Returns a Lark grammar of free text with structures in it."""
    special = _special_tokens(tokenizer)
    names = [f"tag_{number}" for number in range(len(tag.structures))]
    rules = [f"start: ({' | '.join(names)})* text", "text: TEXT", "TEXT: /(?s:.*)/"]
    for name, (begin, schema, end) in zip(names, tag.structures, strict=True):
        trigger = next(each for each in tag.triggers if begin.startswith(each))
        parts = [begin[len(trigger) :], f"%json {json.dumps(schema)}", end]
        body = " ".join(part if part.startswith("%json") else json.dumps(part) for part in parts if part)
        if trigger in special:
            rules.append(f"{name}: TEXT <[{special[trigger]}]> {body}")
        else:
            rules += [f"{name}_trigger[lazy]: TEXT {json.dumps(trigger)}", f"{name}: {name}_trigger {body}"]
    return "\n".join(rules) + "\n"


def _after_reasoning(grammar: str, reasoning: FreeReasoning, tokenizer: Any) -> str:
    """Returns a grammar that permits any text before the first end of the reasoning, and then the other.

    Args:
        grammar: in llguidance's format.
        reasoning: what is free.
        tokenizer: knows which of the tags are special tokens.
    """
    grammars = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    name = grammars[0].get("name") or "answer"
    special = _special_tokens(tokenizer)
    end = reasoning.end
    if end in special:
        rules = f"reasoning: text <[{special[end]}]>\ntext: /(?s:.*)/"
    else:
        rules = f"reasoning[suffix={json.dumps(end)}]: /(?s:.*)/"
    if (begin := reasoning.begin) is None:
        start = f"thought @{name}\nthought: reasoning BLANK"
    else:
        opening = f"<[{special[begin]}]>" if begin in special else json.dumps(begin)
        start = f"thought? @{name}\nthought: {opening} reasoning BLANK"
    first = {"lark_grammar": f"start: {start}\n{rules}\nBLANK: /[ \\n]{{0,4}}/\n"}
    return json.dumps({"grammars": [first, {**grammars[0], "name": name}, *grammars[1:]]})


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
        self._off_grammar = self._off_grammar or self._matcher.try_consume_tokens(new) < len(new)
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
            warnings.warn(f"a structured output ends: {self._matcher.get_error()}", stacklevel=2)
            self._off_grammar = True
            return self._only_eos()
        num_tokens = min(self._forbidden.size, 32 * self._bits.size)
        bits = np.unpackbits(self._bits.view(np.uint8), count=num_tokens, bitorder="little")
        np.equal(bits, 0, out=self._forbidden[:num_tokens])
        return torch.from_numpy(self._forbidden)

    def _only_eos(self) -> Tensor:
        """Allows EOS only: after a token outside of the grammar, such as the request's own stop token."""
        self._forbidden[:] = True
        self._forbidden[self._eos] = False
        return torch.from_numpy(self._forbidden)
