"""Structural tags that make a model call tools in its own format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch_armllm.chat_format.format import ID, INDEX, TYPE, ArgumentFormat, CallFormat, ChatFormat, tokens
from torch_armllm.chat_format.parser import Tools
from torch_armllm.chat_format.plain_schemas import object_properties, plain_values
from torch_armllm.chat_format.probe import CALL_IDS, KEY, NAME
from torch_armllm.chat_format.typed_values import is_text, resolved, types

Part = dict[str, Any]
"""A format of a structural tag."""
_HOLES = {ID: "[a-zA-Z0-9]{9}", INDEX: "[0-9]{1,3}"}
_KEY = re.compile(r"[^\s<>(){}\[\]:=,'\"|]+")
"""Names of arguments that no marker can be taken for."""
ANY_TEXT = {"type": "any_text"}
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
    trigger, *others = (*tokens(begin), "")
    if format.messages or not _is_marker(trigger):
        raise ValueError("its calls begin with no marker of their own")
    if format.content_begin or format.content_end or (format.reasoning and format.reasoning.repeats):
        raise ValueError("its content has markers, which free text cannot have")
    content = _sequence([*_texts(begin[len(trigger) :]), _after_begin(calls, tools, parallel)])
    tag = {"type": "tag", "begin": trigger, "content": content, "end": ""}
    return _tag(
        {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": [tag],
            "stop_after_first": not parallel,
            "excludes": sorted({each for each in others if _is_marker(each)}),
        }
    )


def _is_marker(token: str) -> bool:
    """True if a token of a marker may begin a call; models leave out those before it."""
    return len(token) > 1 and token[0] in "<["


def _known_calls(format: ChatFormat) -> CallFormat:
    if format.calls is None:
        raise ValueError("its format of calls is not known")
    return format.calls


def _tag(part: Part) -> Part:
    return {"type": "structural_tag", "format": part}


def _after_begin(calls: CallFormat, tools: Tools, parallel: bool) -> Part:
    """Returns all that follows the beginning of the first call."""
    one = _either([_sequence(_call(calls, name, schema or {})) for name, schema in tools.items()])
    between = calls.separator + calls.begin
    if not (parallel and calls.parallel):
        parts = [one]
    elif any(hole in between for hole in _HOLES):
        parts = [one, {"type": "star", "content": _sequence([*_texts(between), one])}]
    else:  # the calls are one part, which the limit of parts counts once
        tag = {"type": "tag", "begin": "", "content": one, "end": ""}
        separated = {"type": "tags_with_separator", "tags": [tag], "separator": between}
        parts = [{**separated, "at_least_one": True}]
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
    properties, needed = object_properties(schema)
    made = [(key in needed, _argument(calls, key, value, schema)) for key, value in properties.items()]
    gap = _texts(separator)
    if not separator.strip():
        return [_needed(each, needs) for each, needs in _spaced(made, gap)]
    first = [each for is_needed, each in made if is_needed]
    others = [each for is_needed, each in made if not is_needed]
    if first:
        rest = [_sequence([*gap, each]) for each in first[1:]]
        return [first[0], *rest, *(_optional(_sequence([*gap, each])) for each in others)]
    tails = [_optional(_sequence([*gap, each])) for each in others]
    options = [_sequence([each, *tails[at + 1 :]]) for at, each in enumerate(others)]
    return [_optional(_either(options))] if options else []


def _spaced(made: Sequence[tuple[bool, Part]], gap: list[Part]) -> list[tuple[Part, bool]]:
    """Returns arguments with the white space between those that are given.

    It is the model's to write where any of them may be the first.
    """
    first = next((at for at, (needed, _) in enumerate(made) if needed), None)
    spaced: list[tuple[Part, bool]] = []
    for at, (needed, each) in enumerate(made):
        if first is None:
            before, after = [_optional(_sequence(gap))] if gap and at else [], []
        else:
            before, after = gap if at > first else [], gap if at < first else []
        spaced.append((_sequence([*before, each, *after]), needed))
    return spaced


def _needed(part: Part, needed: bool) -> Part:
    return part if needed else _optional(part)


def _argument(calls: CallFormat, key: str, schema: Any, root: Mapping[str, Any]) -> Part:
    found = resolved(schema, root) if isinstance(schema, dict) else {}
    if schema is False or found is None or not _KEY.fullmatch(key):
        raise ValueError(f"the argument {key[:50]!r} has no place outside of JSON")
    if calls.kind == "python":
        if not key.isidentifier():
            raise ValueError(f"the argument {key[:50]!r} is no name of Python")
        return _sequence([*_texts(f"{key}="), _json(schema, root)])
    if calls.kind == "braces":
        if is_text(found):
            return _between(f"{key}:{calls.quote}", found, calls.quote)
        return _sequence([*_texts(f"{key}:"), _json(schema, root)])
    argument = calls.argument
    assert argument is not None
    if calls.kind == "nested":
        begin, end = f"{argument.key_begin}{key}>", f"{argument.value_end}{key}>"
    else:
        begin = argument.key_begin + key + argument.key_end + argument.before
        end = argument.after + argument.value_end
    allowed = types(found)
    if not allowed or "string" in allowed:
        return _between(begin.replace(TYPE, argument.string_type or ""), found, end)
    begin = begin.replace(TYPE, _type_name(argument, allowed))
    return _sequence([*_texts(begin), _json(schema, root), *_texts(end)])


def _type_name(argument: ArgumentFormat, allowed: set[str]) -> str:
    """Returns what stands in the place of a type that is no string: JSON's name, or what the format has."""
    if argument.string_type != "string":
        return argument.other_type or ""
    name = sorted(allowed)[0]
    return "number" if name == "integer" else name


def _between(begin: str, schema: Any, end: str) -> Part:
    """Returns a text without quotes, between markers."""
    values = plain_values(schema)
    if values is not None:
        return _sequence([_text(begin), _either([_text(value) for value in values]), _text(end)])
    content: Part = {"type": "any_text", "excludes": [end.strip()]} if end.strip() != end else ANY_TEXT
    if (most := schema.get("maxLength")) is not None:
        content = {**content, "max_chars": most}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


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
    """Returns parts after each other; the limit of parts counts adjacent texts once."""
    joined: list[Part] = []
    for part in parts:
        for each in part["elements"] if part["type"] == "sequence" else [part]:
            before = joined[-1] if joined and joined[-1]["type"] == "const_string" else None
            if before is not None and each["type"] == "const_string":
                joined[-1] = _text(before["value"] + each["value"])
            elif before is not None and each["type"] == "tag":
                joined[-1] = {**each, "begin": before["value"] + each["begin"]}
            else:
                joined.append(each)
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined or [_text("")]}


def _either(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def _optional(part: Part) -> Part:
    return {"type": "optional", "content": part}
