"""Target: random and mutated structured outputs, sampled from the tokens that they allow.

A format compiles, or a ValueError says why not.  An output that ends by itself matches its JSON schema, its
regular expression or its choices, as jsonschema and re judge it.
"""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from fractions import Fraction
from functools import cache
from typing import Any

import jsonschema
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import bytes_and_words
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams, StructuredOutputsParams
from torch_armllm.engine.structured.matcher import GrammarMatcher, StructuredOutputs
from torch_armllm.server.tools.forced import calls_schema

END, PAD = 0, 7
"""EOS, and columns of logits beyond the tokenizer's ids."""
MAX_TOKENS = 120
_SECONDS = 1.0
"""Time of an output."""
_WORDS = ['{"', '":', "yes", "no", "Ġno", "true", '"}', "12", "aa", "],", "false"]
_LETTERS = ["a", "b", "é", "日", "🤗", '"', "\\", "\n", " ", "1", "-", ".", "(", "]", "{", "/"]
_SCHEMA_NOISE = [
    None,
    True,
    -1,
    0,
    0.07,
    9973,
    10**6 + 3,
    2**63,
    -(2**63),
    -1e300,
    "",
    "string",
    "objekt",
    [],
    {},
    [1],
    {"type": "string"},
    "(",
    "#",
]
_REGEX_NOISE = [
    *"()[]{}|*+?^$.\\,-0aé",
    "(?i)",
    "(?=a)",
    "\\b",
    "\\p{L}",
    "{999}",
    "{2,1}",
    "[^",
    "\\1",
    "&&",
    "~",
    "\x00",
]
_GRAMMAR_NOISE = [
    *'()[]{}|*+?:"/~.%!_\n',
    "start",
    "%ignore ",
    "%import common.INT\n",
    "{1000000}",
    "-> x",
    "/(/",
    "@",
    "%json {",
]


class Finding(Exception):
    """An output that its format does not allow, or a format that leaves no token."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and a few longer tokens."""
    return bytes_and_words(_WORDS, ["<end>"])


@cache
def _outputs() -> StructuredOutputs:
    return StructuredOutputs(tokenizer(), len(tokenizer()) + PAD, [END])


def draw_regex(draw: random.Random, depth: int = 3) -> str:
    """Returns an expression of the syntax that Rust's regex and Python's re share."""
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        return draw.choice([re.escape(draw.choice(_LETTERS)), "[a-f]", "[^a-y]", "[0-9é日]", "yes", "."])
    inner = [draw_regex(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    if kind < 0.55:
        return "".join(inner)
    if kind < 0.75:
        return f"({'|'.join(inner)})"
    return f"(?:{inner[0]})" + draw.choice(["*", "+", "?", "{2}", "{0,3}", "{1,}"])


def draw_schema(draw: random.Random, depth: int = 3) -> Any:
    """Returns a schema of keywords that llguidance knows, most of them satisfiable."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf", "allOf", "oneOf", "types", "ref", "any"]
    kind = draw.choice(kinds)
    low = draw.randint(-20, 20)
    if kind == "string":
        return {"type": "string", **draw.choice([
            {},
            {"minLength": draw.randint(0, 3)},
            {"maxLength": draw.randint(0, 5)},
            {"minLength": 1, "maxLength": draw.randint(1, 4)},
            {"pattern": "^" + draw_regex(draw, 2) + "$"},
            {"pattern": draw_regex(draw, 1)},
            {"format": draw.choice(["date", "time", "uuid", "ipv4", "email", "date-time"])},
        ])}  # fmt: skip
    if kind in ("integer", "number"):
        return {"type": kind, **draw.choice([
            {},
            {"minimum": low},
            {"maximum": low + 0.5},
            {"minimum": low, "maximum": low + draw.randint(0, 300)},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + draw.randint(2, 9)},
            {"multipleOf": draw.randint(1, 12)},
        ])}  # fmt: skip
    values = [draw.choice(_LETTERS), low, True, None, {"a": [low]}, [], "yes"]
    if kind == "enum":
        return {"enum": draw.sample(values, draw.randint(1, 5))}
    if kind == "const":
        return {"const": draw.choice(values)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "object":
        names = draw.sample(["a", "b", "é", 'q"', "", "x y", "yes"], draw.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: draw_schema(draw, depth - 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
        }
        if draw.random() < 0.7:
            schema["additionalProperties"] = draw.choice([False, False, True, {"type": "boolean"}])
        return schema
    if kind == "array":
        schema = {"type": "array", "items": draw_schema(draw, depth - 1), "minItems": draw.randint(0, 2)}
        if draw.random() < 0.7:
            schema["maxItems"] = schema["minItems"] + draw.randint(0, 2)
        if draw.random() < 0.2:
            schema["prefixItems"] = [draw_schema(draw, 0)]
        return schema
    if kind == "types":
        return {"type": draw.sample(["string", "integer", "null", "boolean", "array"], 2)}
    if kind == "ref":
        return {"$ref": draw.choice(["#/$defs/one", "#/$defs/two"])}
    if kind == "any":
        return draw.choice([True, {}])
    return {kind: [draw_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def draw_grammar(draw: random.Random) -> str:
    """Returns a Lark grammar, with recursion on either side."""
    names = ["start", *(f"r{i}" for i in range(draw.randint(0, 4)))]

    def expression(depth: int) -> str:
        parts = []
        for _ in range(draw.randint(1, 3)):
            atoms = [
                json.dumps(draw.choice(_LETTERS), ensure_ascii=False),
                "WORD",
                f"/{draw.choice(['[a-z]+', 'x*', 'a|b'])}/",
            ]
            part = draw.choice([*atoms, draw.choice(names), f"({expression(depth - 1)})" if depth else '"z"'])
            parts.append(part + draw.choice(["", "", "*", "+", "?", "~2", "~0..3"]))
        return draw.choice([" ", " | "]).join(parts)

    rules = [f"{name}: {expression(2)}" for name in names]
    more = draw.choice(["", "%ignore /[ ]+/\n", "%import common.INT\n"])
    return "\n".join(rules) + '\nWORD: "yes" | /[0-9]{1,3}/\n' + more


def draw_ebnf(draw: random.Random) -> str:
    """Returns a grammar in EBNF, with recursion on either side."""
    names = ["root", *(f"r-{i}" for i in range(draw.randint(0, 4)))]

    def expression(depth: int) -> str:
        parts = []
        for _ in range(draw.randint(1, 3)):
            atoms = [json.dumps(draw.choice(_LETTERS)), "[^a-c\\n]", ".", '""']
            part = draw.choice([*atoms, draw.choice(names), f"({expression(depth - 1)})" if depth else '"z"'])
            parts.append(part + draw.choice(["", "", "*", "+", "?", "{2}", "{0,3}"]))
        return draw.choice([" ", " | "]).join(parts)

    return "\n".join(f"{name} ::= {expression(2)} # {name}" for name in names) + "\n"


def draw_tag(draw: random.Random) -> dict[str, Any]:
    """Returns a structural tag of either shape."""
    if draw.random() < 0.7:
        return {"type": "structural_tag", "format": draw_tag_format(draw, draw.randint(0, 3))}
    triggers = draw.sample(["<f", "<g>", "é", "</s>", '"'], draw.randint(1, 3))
    structures = [
        {"begin": draw.choice(triggers) + draw.choice(["", "=a>", "\n"]), "schema": {}, "end": "</f>"}
        for _ in range(draw.randint(1, 3))
    ]
    for structure in structures:
        schema = draw_schema(draw, 1)
        structure["schema"] = schema if isinstance(schema, dict) else {}
    return {"triggers": triggers, "structures": structures}


_TAG_TEXTS = ["a", "b", "<f>", "</f>", ",", "(", ")", "é", "x<"]


def draw_tag_format(draw: random.Random, depth: int) -> dict[str, Any]:
    """Returns a format of a structural tag; some are refused, as free text does not tell where it ends."""

    def tag(begin: str) -> dict[str, Any]:
        content = draw_tag_format(draw, depth - 1)
        end = draw.choice(["</f>", ")", [")", "]"], ""])
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    kinds = ["const_string", "json_schema", "any_text", "regex", "grammar"]
    if depth:
        kinds += ["sequence", "or", "optional", "plus", "star", "repeat", "tag"]
        kinds += ["triggered_tags", "tags_with_separator", "dispatch"]
    kind = draw.choice(kinds)
    made: dict[str, Any] = {"type": kind}
    triggers = draw.sample(["<f", "(", "x<"], draw.randint(1, 2))
    few = draw.randint(1, 3)
    if kind == "const_string":
        made["value"] = draw.choice([*_TAG_TEXTS, ""])
    elif kind == "json_schema":
        schema = draw_schema(draw, 1)
        made["json_schema"] = schema if isinstance(schema, dict) and "$ref" not in str(schema) else True
    elif kind == "any_text":
        made |= draw.choice([{}, {"excludes": draw.sample(_TAG_TEXTS, few)}, {"max_chars": few}])
    elif kind == "regex":
        made["pattern"] = draw_regex(draw, 2)
    elif kind == "grammar":
        made["grammar"] = draw.choice([draw_ebnf, draw_grammar])(draw)
    elif kind in ("sequence", "or"):
        made["elements"] = [draw_tag_format(draw, depth - 1) for _ in range(few)]
    elif kind == "tag":
        made = tag(draw.choice(_TAG_TEXTS))
    elif kind == "triggered_tags":
        made |= {"triggers": triggers, "tags": [tag(each) for each in triggers]}
    elif kind == "tags_with_separator":
        made |= {"separator": draw.choice([",", ""]), "tags": [tag(draw.choice(_TAG_TEXTS))]}
    elif kind == "dispatch":
        made["rules"] = [[each, draw_tag_format(draw, depth - 1)] for each in triggers]
    else:
        made["content"] = draw_tag_format(draw, depth - 1)
        if kind == "repeat":
            made |= {"min": few, "max": draw.choice([-1, few, few + 1])}
    if kind in ("triggered_tags", "tags_with_separator"):
        made |= {name: draw.random() < 0.3 for name in ("at_least_one", "stop_after_first")}
    return made


def _mutate_text(draw: random.Random, text: str, noise: list[str]) -> str:
    for _ in range(draw.choice([1, 1, 2, 8])):
        start = draw.randint(0, len(text))
        end = start + draw.choice([0, 0, 1, 3, 20])
        text = text[:start] + draw.choice([*noise, text[start:end] * draw.choice([2, 50])]) + text[end:]
    return text


def _mutate_schema(draw: random.Random, schema: Any) -> Any:
    """Replaces a random part of a schema by something else."""
    if draw.random() < 0.3 or not isinstance(schema, (dict, list)) or not schema:
        return draw.choice([*_SCHEMA_NOISE, draw_schema(draw, 1)])
    key: Any = draw.choice(list(schema) if isinstance(schema, dict) else range(len(schema)))
    copy: Any = schema.copy()
    if draw.random() < 0.15:
        del copy[key]
    else:
        copy[key] = _mutate_schema(draw, schema[key])
    return copy


def draw_format(draw: random.Random) -> tuple[dict[str, Any], bool]:
    """Returns fields of `StructuredOutputsParams`, and whether its outputs can be judged."""
    kind = draw.choice(
        ["json", "json", "json", "tools", "regex", "regex", "choice", "grammar", "ebnf", "tag", "json_object"]
    )
    mutated = draw.random() < 0.4
    if kind in ("json", "tools"):
        schema = draw_schema(draw)
        if isinstance(schema, dict):
            schema["$defs"] = {"one": draw_schema(draw, 1), "two": draw_schema(draw, 2)}
        if kind == "tools":
            parameters = schema if isinstance(schema, dict) else None
            names = draw.sample(["a", "größer", 'x"y'], draw.randint(1, 3))
            schema = calls_schema(dict.fromkeys(names, parameters), draw.random() < 0.5)
        if mutated:
            for _ in range(draw.choice([1, 1, 3])):
                schema = _mutate_schema(draw, schema)
        if mutated and draw.random() < 0.2:
            return {"json": _mutate_text(draw, json.dumps(schema), _REGEX_NOISE)}, False
        return {
            "json": schema if isinstance(schema, dict) and draw.random() < 0.5 else json.dumps(schema)
        }, True
    if kind == "regex":
        regex = draw_regex(draw)
        return {"regex": _mutate_text(draw, regex, _REGEX_NOISE) if mutated else regex}, not mutated
    if kind == "tag":
        tag = draw_tag(draw)
        if mutated:
            return {"structural_tag": _mutate_text(draw, json.dumps(tag), _REGEX_NOISE)}, False
        return {"structural_tag": tag}, False
    if kind in ("grammar", "ebnf"):
        grammar = draw_ebnf(draw) if kind == "ebnf" else draw_grammar(draw)
        return {"grammar": _mutate_text(draw, grammar, _GRAMMAR_NOISE) if mutated else grammar}, False
    if kind == "choice":
        size = draw.choice([1, 2, 5, 300])
        return {
            "choice": [
                "".join(draw.choices([*_LETTERS, "\r", "\0", "|", "yes"], k=draw.randint(0, 6)))
                for _ in range(size)
            ]
        }, True
    return {"json_object": True}, True


def _generate(draw: random.Random, matcher: GrammarMatcher) -> list[int] | None:
    """Draws allowed tokens until the end of the output; None if it is cut by its length, or by the time.

    Each mask of a grammar that matches in many ways may take a tenth of a second: llguidance ends an output
    when more than 2000 ways are open.
    """
    end = time.monotonic() + _SECONDS
    sequence = Request("r", [1], SamplingParams(), 0).sequences[0]
    quiet = {token for name, token in tokenizer().get_vocab().items() if set(name) <= set("ĠĊĉčĀ")}
    while sequence.output_length < MAX_TOKENS and time.monotonic() < end:
        allowed = (~matcher.forbidden(sequence, ())).nonzero().flatten().tolist()
        if not allowed:
            raise Finding(f"no token may follow {_text(sequence)!r}")
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.4):
            return sequence.output_token_ids
        inner = [token for token in allowed if token != END]
        likely = [token for token in inner if token not in quiet] or inner
        token = draw.choice(likely if draw.random() < 0.98 else inner)
        if draw.random() < 0.1:
            _check_draft(draw, matcher, sequence, token)
        sequence.token_ids.append(token)
    return None


def _check_draft(draw: random.Random, matcher: GrammarMatcher, sequence: Sequence, token: int) -> None:
    """Compares the tokens after a draft with those after the same tokens of the sequence."""
    if token == END:
        return
    prefix = [token, draw.randrange(len(tokenizer()))]
    matcher.forbidden(sequence, prefix)
    drafted = matcher.forbidden(sequence, prefix[:1]).clone()
    sequence.token_ids.append(token)
    if not drafted.equal(matcher.forbidden(sequence, ())):
        raise Finding(f"after {_text(sequence)!r}, other tokens are allowed than after the draft")
    sequence.token_ids.pop()
    matcher._matcher.rollback(1)
    matcher._count -= 1


def _text(sequence: Sequence) -> str:
    return str(tokenizer().decode(sequence.output_token_ids))


def _exact(number: str) -> Fraction:
    """Parses a number without rounding; raises OverflowError for exponents that would fill the memory."""
    if len(number.lower().partition("e")[2]) > 4:
        raise OverflowError
    return Fraction(number)


def _judge(given: dict[str, Any], text: str) -> None:
    """Raises Finding if a format does not allow an output."""
    ((kind, value),) = given.items()
    if kind == "regex" and not re.fullmatch(value, text):
        raise Finding(f"regex {value!r} does not match {text!r}")
    if kind == "choice" and text not in value:
        raise Finding(f"{text!r} is none of {value}")
    if kind == "json_object" and not isinstance(json.loads(text), dict):
        raise Finding(f"{text!r} is no object")
    if kind == "json":
        schema = value if isinstance(value, str) else json.dumps(value)
        try:
            found, exact = (json.loads(each, parse_float=_exact) for each in (text, schema))
        except OverflowError:
            return
        validator = jsonschema.Draft202012Validator(exact)
        try:
            # draft 4's booleans of exclusiveMinimum, which llguidance reads, are numbers here
            validator.check_schema(exact)
            error = next(iter(validator.iter_errors(found)), None)
        except Exception:  # a mutated schema that jsonschema cannot interpret
            return
        if error is not None:
            raise Finding(f"{text!r} of {schema}: {error.message}")


def run(seed: int) -> None:
    """Compiles a random format, and samples from it.

    Raises:
        Finding: an output does not match its format.
        Exception: an error other than ValueError.
    """
    draw = random.Random(f"grammars {seed}")
    given, judged = draw_format(draw)
    try:
        params = StructuredOutputsParams(**given)
        _outputs().check(params)
    except ValueError as error:
        if not str(error):
            raise Finding(f"{given}: an error without a text") from error
        return
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokens = _generate(draw, _outputs().matcher(params))
        if tokens is not None and judged and not caught:
            _judge(given, str(tokenizer().decode(tokens)))
