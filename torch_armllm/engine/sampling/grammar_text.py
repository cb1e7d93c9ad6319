"""Formats of structured outputs as texts that llguidance reads."""

from __future__ import annotations

import json
from typing import Any

from torch_armllm.engine.sampling.ebnf import ebnf_to_lark
from torch_armllm.engine.sampling_params import FreeReasoning, StructuredOutputsParams
from torch_armllm.engine.structural_tag import StructuralTag, read_structural_tag
from torch_armllm.engine.structured_limits import is_gbnf

_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""After a user's rules.  Otherwise llguidance looks for the bytes that have to follow, without an end where
they repeat and the rules never let them end, as in ``start: A A`` with ``A: "b"+``."""
_OPTIONS = "x-guidance"
"""llguidance's options, at the top of a schema."""


def grammar_text(params: StructuredOutputsParams, tokenizer: Any) -> str:
    """Returns the grammar of a request in llguidance's format.

    Args:
        params: of the request.
        tokenizer: knows which texts are special tokens.

    Raises:
        ValueError: the format is no valid one.
    """
    grammar = _answer(params, tokenizer)
    return grammar if params.reasoning is None else _after_reasoning(grammar, params.reasoning, tokenizer)


def _answer(params: StructuredOutputsParams, tokenizer: Any) -> str:
    from llguidance import LLMatcher, grammar_from

    if params.json is not None:
        schema = params.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as fault:
                raise ValueError(f"structured outputs: the schema is not valid JSON: {fault}") from fault
        return _of_schema(schema, params.whitespace_pattern)
    if params.json_object:
        return _of_schema({"type": "object"}, params.whitespace_pattern)
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        return str(grammar_from("choice", json.dumps(params.choice)))
    if params.structural_tag is not None:
        tag = read_structural_tag(params.structural_tag)
        return str(LLMatcher.grammar_from_lark(_tagged(tag, tokenizer)))
    grammar = params.grammar
    assert grammar is not None
    lark = ebnf_to_lark(grammar) if is_gbnf(grammar) else grammar
    return str(LLMatcher.grammar_from_lark(lark + _UNFORCED))


def _of_schema(schema: Any, space: str | None) -> str:
    from llguidance import LLMatcher

    check_options(schema)
    if space is not None:
        _check_space(space)
    defaults = None if space is None else {"whitespace_pattern": space}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults))


def check_options(schema: Any) -> None:
    """Raises ValueError for options of llguidance in a schema with which its JSON would be none."""
    options = schema.get(_OPTIONS, {}) if isinstance(schema, dict) else {}
    for name, value in options.items() if isinstance(options, dict) else ():
        if name == "whitespace_pattern" and isinstance(value, str):
            _check_space(value)
        elif not isinstance(value, bool):
            raise ValueError(
                f"structured outputs: {_OPTIONS} of the schema sets {name} to {str(value)[:100]!r}; only "
                "whitespace_pattern and options that are true or false can be set"
            )


def _check_space(pattern: str) -> None:
    """Raises ValueError if white space between JSON's parts may be other text, which may repeat for ever."""
    from llguidance import LLMatcher, LLTokenizer, regex_to_lark

    other = f"start: OTHER\nOTHER: /(?:{regex_to_lark(pattern, '')})/ & ~/\\s*/"
    matcher = LLMatcher(LLTokenizer("byte"), other + _UNFORCED, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # an error if there is no other text
        if not matcher.is_error():
            raise ValueError(
                f"structured outputs: whitespace_pattern {pattern[:100]!r} matches text that is no white "
                "space, as [ \\t\\n\\r]* does not"
            )


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
