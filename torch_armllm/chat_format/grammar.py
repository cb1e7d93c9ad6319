"""Structural tags that make a model call tools in its own format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch_armllm.chat_format.braces_calls import QUOTE
from torch_armllm.chat_format.format import ID, INDEX, TYPE, ArgumentFormat, CallFormat, ChatFormat, tokens
from torch_armllm.chat_format.parser import Tools
from torch_armllm.chat_format.probe import CALL_IDS, KEY, NAME
from torch_armllm.chat_format.typed_values import is_text, resolved, types

Part = dict[str, Any]
"""A format of a structural tag."""
_HOLES = {ID: "[a-zA-Z0-9]{9}", INDEX: "[0-9]{1,3}"}
_SPACES = {"x-guidance": {"whitespace_pattern": "[ ]{0,1}"}}
"""A space at most between parts of JSON: small models may generate white space without end."""


def forced_calls(format: ChatFormat, tools: Tools, parallel: bool) -> Part:
    """Returns the structural tag of an output that consists of calls.

    Args:
        format: the model's format.
        tools: name and JSON schema of the arguments of each tool that may be called.
        parallel: True if there may be several calls.

    Raises:
        ValueError: a grammar cannot express the calls.
    """
    calls = _known_calls(format)
    begin = calls.section_begin + calls.begin
    if format.begun and begin.startswith(format.begun):
        begin = begin[len(format.begun) :]  # the prompt has it
    if format.messages:
        return _tag(_messages(format, tools))
    return _tag(_sequence([*_texts(begin), _after_begin(calls, tools, parallel)]))


def triggered_calls(format: ChatFormat, tools: Tools, parallel: bool) -> Part:
    """Returns the structural tag of free text in which a call, once it has begun, is one of the tools'.

    Args and errors are those of `forced_calls`.
    """
    calls = _known_calls(format)
    begin = (calls.section_begin + calls.begin).lstrip()
    trigger = begin[: min((at for hole in _HOLES if (at := begin.find(hole)) >= 0), default=len(begin))]
    if format.messages or not any(part[0] in "<[" and len(part) > 1 for part in tokens(trigger)):
        raise ValueError("its calls begin with no marker of their own")
    content = _sequence([*_texts(begin[len(trigger) :]), _after_begin(calls, tools, parallel)])
    tag = {"type": "tag", "begin": trigger, "content": content, "end": ""}
    return _tag(
        {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": [tag],
            "stop_after_first": not parallel,
        }
    )


def _known_calls(format: ChatFormat) -> CallFormat:
    if format.calls is None:
        raise ValueError("its format of calls is not known")
    return format.calls


def _tag(part: Part) -> Part:
    return {"type": "structural_tag", "format": part}


def _after_begin(calls: CallFormat, tools: Tools, parallel: bool) -> Part:
    """Returns all that follows the beginning of the first call."""
    one = _either([_sequence(_call(calls, name, schema or {})) for name, schema in tools.items()])
    parts = [one]
    if parallel and calls.parallel:
        more = _sequence([*_texts(calls.separator + calls.begin), one])
        parts.append({"type": "star", "content": more})
    return _sequence([*parts, *_texts(calls.section_end)])


def _call(calls: CallFormat, name: str, schema: Mapping[str, Any]) -> list[Part]:
    """Returns a call of a tool, from behind its beginning up to its end."""
    if calls.kind == "json":
        before, after = _layout(calls, name)
        return [*_texts(before), _json(schema, schema), *_texts(after + calls.end)]
    named = _texts(name + calls.name_end)
    if calls.kind == "tag_json":
        return [*named, _json(schema, schema), *_texts(calls.end)]
    between = ", " if calls.kind == "python" else ","
    if calls.kind == "python":
        return [*_texts(name + "("), *_arguments(calls, schema, between), *_texts(")" + calls.end)]
    if calls.kind == "braces":
        return [*_texts(name + "{"), *_arguments(calls, schema, between), *_texts("}" + calls.end)]
    separator = "" if calls.argument is None else calls.argument.separator
    return [*named, *_arguments(calls, schema, separator), *_texts(calls.end)]


def _layout(calls: CallFormat, name: str) -> tuple[str, str]:
    """Returns what the template writes before and behind a call's arguments in JSON."""
    layout = calls.json.layout.replace(NAME, json.dumps(name, ensure_ascii=False)[1:-1])
    begin = layout.rfind("{", 0, layout.find(KEY))
    if begin < 0:
        raise ValueError("its JSON is not known")
    end = json.JSONDecoder().raw_decode(layout, begin)[1]
    before, after = layout[:begin], layout[end:]
    for call_id in CALL_IDS:
        before, after = before.replace(call_id, ID), after.replace(call_id, ID)
    return before, after


def _arguments(calls: CallFormat, schema: Mapping[str, Any], separator: str) -> list[Part]:
    """Returns the arguments in the schema's order; those that are not required may be missing."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return []
    required = schema.get("required")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    made = [(key in needed, _argument(calls, key, value, schema)) for key, value in properties.items()]
    if not separator.strip():
        gap = _texts(separator)
        return [_needed(each, needs) for each, needs in _spaced(made, gap)]
    first = [each for is_needed, each in made if is_needed]
    others = [each for is_needed, each in made if not is_needed]
    gap = _texts(separator)
    if first:
        rest = [_sequence([*gap, each]) for each in first[1:]]
        return [first[0], *rest, *(_optional(_sequence([*gap, each])) for each in others)]
    tails = [_optional(_sequence([*gap, each])) for each in others]
    options = [_sequence([each, *tails[at + 1 :]]) for at, each in enumerate(others)]
    return [_optional(_either(options))] if options else []


def _spaced(made: Sequence[tuple[bool, Part]], gap: list[Part]) -> list[tuple[Part, bool]]:
    """Returns arguments with the white space between them."""
    return [(_sequence([*(gap if at else []), each]), needed) for at, (needed, each) in enumerate(made)]


def _needed(part: Part, needed: bool) -> Part:
    return part if needed else _optional(part)


def _argument(calls: CallFormat, key: str, schema: Any, root: Mapping[str, Any]) -> Part:
    found = resolved(schema, root) if isinstance(schema, dict) else {}
    if calls.kind == "python":
        return _sequence([*_texts(f"{key}="), _json(schema, root)])
    if calls.kind == "braces":
        if is_text(found):
            return _sequence([*_texts(f"{key}:{QUOTE}"), _free(found), *_texts(QUOTE)])
        return _sequence([*_texts(f"{key}:"), _json(schema, root)])
    argument = calls.argument
    assert argument is not None
    if calls.kind == "nested":
        begin, end = f"{argument.key_begin}{key}>", f"{argument.value_end}{key}>"
    else:
        begin = argument.key_begin + key + argument.key_end + argument.before
        end = argument.after + argument.value_end
    allowed = types(found)
    value = _free(found) if not allowed or "string" in allowed else _json(schema, root)
    kind = (
        (argument.string_type or "") if not allowed or "string" in allowed else _type_name(argument, allowed)
    )
    return _sequence([*_texts(begin.replace(TYPE, kind)), value, *_texts(end)])


def _type_name(argument: ArgumentFormat, allowed: set[str]) -> str:
    """Returns what stands in the place of a type that is no string: JSON's name, or what the format has."""
    if argument.string_type != "string":
        return argument.other_type or ""
    name = sorted(allowed)[0]
    return "number" if name == "integer" else name


def _free(schema: Any) -> Part:
    """Returns a text without quotes."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values and all(isinstance(value, str) and value for value in values):
        return _either([_text(value) for value in values])
    return {"type": "any_text"}


def _messages(format: ChatFormat, tools: Tools) -> Part:
    """Returns a message to a function; outputs of several messages hold one call."""
    start = _optional(_text("<|start|>assistant"))
    if format.messages == "harmony":
        options = [
            _sequence(
                [
                    _text(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
                    _json(schema or {}, schema or {}),
                ]
            )
            for name, schema in tools.items()
        ]
        return _sequence([start, _either(options)])
    calls = _known_calls(format)
    options = [
        _sequence(
            [
                _text(f" to={name}<|message|>"),
                *_texts(calls.section_begin + calls.begin),
                *_call(calls, name, schema or {}),
                *_texts(calls.section_end),
            ]
        )
        for name, schema in tools.items()
    ]
    return _sequence([start, _either(options)])


def _json(schema: Any, root: Mapping[str, Any]) -> Part:
    """Returns JSON of a schema, which may refer to the definitions of another."""
    made = dict(schema) if isinstance(schema, dict) else {}
    if schema is root and not made.get("type") and not made.get("$ref"):
        made["type"] = "object"
    for name in ("$defs", "definitions"):
        if name in root:
            made.setdefault(name, root[name])
    return {"type": "json_schema", "json_schema": {**made, **_SPACES}}


def _text(value: str) -> Part:
    return {"type": "const_string", "value": value}


def _texts(marker: str) -> list[Part]:
    """Returns a marker, with a regular expression for each of its holes."""
    parts: list[Part] = []
    text = ""
    for character in marker:
        if character in _HOLES:
            parts += [_text(text)] if text else []
            parts.append({"type": "regex", "pattern": _HOLES[character]})
            text = ""
        else:
            text += character
    return [*parts, _text(text)] if text else parts


def _sequence(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts) or [_text("")]}


def _either(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def _optional(part: Part) -> Part:
    return {"type": "optional", "content": part}
