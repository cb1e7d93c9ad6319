"""Formats of structured outputs as texts that llguidance reads."""

from __future__ import annotations

import json
from typing import Any

from torch_armllm.engine.sampling_params import FreeReasoning, StructuredOutputsParams
from torch_armllm.engine.structured.guidance_options import check_options, check_space
from torch_armllm.engine.structured.structural_tag import read_structural_tag
from torch_armllm.engine.structured.tag_grammar import literals, special_tokens, tag_grammar, user_grammar


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
        return tag_grammar(read_structural_tag(params.structural_tag), special_tokens(tokenizer))
    grammar = params.grammar
    assert grammar is not None
    return str(LLMatcher.grammar_from_lark(user_grammar(grammar)))


def _of_schema(schema: Any, space: str | None) -> str:
    from llguidance import LLMatcher

    check_options(schema)
    if space is not None:
        check_space(space)
    defaults = None if space is None else {"whitespace_pattern": space}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults))


def _after_reasoning(grammar: str, reasoning: FreeReasoning, tokenizer: Any) -> str:
    """Returns a grammar that permits any text before the first end of the reasoning, and then the other.

    Args:
        grammar: in llguidance's format.
        reasoning: what is free.
        tokenizer: knows which of the tags are special tokens.
    """
    grammars = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    name = grammars[0].get("name") or "answer"
    special = special_tokens(tokenizer)
    first_end, *more_ends = literals(reasoning.end, special)
    if first_end.startswith("<"):
        rules = f"reasoning: text {' '.join([first_end, *more_ends])}\ntext: /(?s:.*)/"
    else:
        rules = f"reasoning: free {' '.join(more_ends)}\nfree[suffix={first_end}]: /(?s:.*)/"
    if reasoning.begin is None:
        start = f"thought @{name}\nthought: reasoning BLANK"
    else:
        opening = " ".join(literals(reasoning.begin, special))
        start = f"thought? @{name}\nthought: {opening} reasoning BLANK"
    first = {"lark_grammar": f"start: {start}\n{rules}\nBLANK: /[ \\n]{{0,4}}/\n"}
    return json.dumps({"grammars": [first, {**grammars[0], "name": name}, *grammars[1:]]})
