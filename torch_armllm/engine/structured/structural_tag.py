"""Structural tags: free text in which a trigger begins a tag, such as a call of a function, and more formats.

They have the shape of xgrammar's: ``{"type": "structural_tag", "format": {"type": …}}``, or the older one of
triggers and structures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch_armllm.engine.structured.tag_formats import (
    AnyText,
    Chain,
    Either,
    Format,
    Grammar,
    Regex,
    Repeat,
    Schema,
    Separated,
    Tag,
    Text,
    Token,
    Triggered,
)

MAX_DEPTH = 64
"""Formats inside each other."""


def read_structural_tag(given: str | dict[str, Any]) -> Format:
    """Returns the format of a structural tag.

    Args:
        given: ``{"type": "structural_tag", "format": {"type": …, …}}`` or ``{"triggers": […], "structures":
            [{"begin": …, "schema": …, "end": …}]}``, or one of them as text.

    Raises:
        ValueError: it is no JSON, has another form, or holds what is not supported.
    """
    tag: Any = given
    if isinstance(given, str):
        try:
            tag = json.loads(given)
        except (ValueError, RecursionError) as fault:
            raise _refused(f"structural_tag is not valid JSON: {fault}") from fault
    if isinstance(tag, Mapping) and tag.get("format") is not None:
        if tag.get("triggers") is not None or tag.get("structures") is not None:
            raise _refused("structural_tag has a format, and triggers or structures as well; give one shape")
        return _format(tag["format"], "format", 1)
    if not isinstance(tag, Mapping) or not all(_is_list(tag.get(n)) for n in ("triggers", "structures")):
        raise _refused(
            'structural_tag needs {"format": {"type": …}}, or {"triggers": [text, …], "structures": '
            '[{"begin": text, "schema": {…}, "end": text}, …]}'
        )
    _check_triggers(tag["triggers"])
    return _triggered(tag["triggers"], tuple(map(_structure, tag["structures"])))


def _refused(why: str) -> ValueError:
    return ValueError(f"structured outputs: {why}")


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _structure(given: Any) -> Tag:
    """Returns a structure of the older shape."""
    if not isinstance(given, Mapping):
        raise _refused(f"the structure {given!r} is no dict of begin, schema and end")
    begin, schema, end = (given.get(name) for name in ("begin", "schema", "end"))
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise _refused(
            f"a structure needs the texts begin and end, and the dict schema; it has "
            f"{', '.join(map(str, given)) or 'nothing'}"
        )
    return Tag(Text(begin), Schema(schema), (Text(end),))


def _check_triggers(triggers: list[Any]) -> None:
    for trigger in triggers:
        if not isinstance(trigger, str) or not trigger:
            raise _refused(f"the trigger {trigger!r} is no text of a character or more")


def _triggered(triggers: list[str], tags: tuple[Tag, ...], **more: Any) -> Triggered:
    for tag in tags:
        begin = tag.begin.value if isinstance(tag.begin, Text) else ""
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise _refused(
                f"the structure {begin[:100]!r} begins with no trigger; triggers: "
                f"{', '.join(map(repr, triggers))[:200]}"
            )
    first = tuple(each for each in triggers if not any(each.startswith(o) for o in triggers if o != each))
    return Triggered(tuple(dict.fromkeys(first)), tags, **more)


class _Fields:
    """The fields of a format, read one after the other."""

    def __init__(self, given: Mapping[str, Any], at: str, depth: int) -> None:
        self._left = dict(given)
        self._at = at
        self._depth = depth
        self.kind = self._left.pop("type", None)

    def _take(self, name: str, wanted: str, fits: Callable[[Any], bool], default: Any = ...) -> Any:
        value = self._left.pop(name, default)
        if value is ... or (value is not default and not fits(value)):
            told = "nothing" if value is ... else repr(value)[:100]
            raise _refused(f"{self._at}.{name} is {told}; give {wanted}")
        return value

    def text(self, name: str) -> str:
        return str(self._take(name, "a text", lambda value: isinstance(value, str)))

    def filled(self, name: str) -> str:
        return str(self._take(name, "a text", lambda value: isinstance(value, str) and bool(value)))

    def texts(self, name: str) -> tuple[str, ...]:
        """Returns a list of texts that are not empty, which may be missing."""
        return tuple(
            self._take(name, "a list of texts", lambda v: _all_of(v, lambda e: isinstance(e, str) and e), ())
        )

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._take(name, "true or false", lambda value: isinstance(value, bool), default))

    def count(self, name: str, default: Any = ...) -> Any:
        return self._take(name, "a number from 0 on", _is_count, default)

    def value(self, name: str, wanted: str, fits: Callable[[Any], bool]) -> Any:
        return self._take(name, wanted, fits)

    def refuse(self, name: str, default: Any, remedy: str) -> None:
        """Refuses a field that is set to something else than its default."""
        value = self._left.pop(name, default)
        if value != default:
            raise _refused(f"{self._at}.{name} is {value!r}, which is not supported; {remedy}")

    def format(self, name: str) -> Format:
        given = self._take(name, "a format", lambda value: isinstance(value, Mapping))
        return _format(given, f"{self._at}.{name}", self._depth + 1)

    def formats(self, name: str) -> tuple[Format, ...]:
        given = self._take(name, "a list of formats", lambda v: _all_of(v, _is_format) and bool(v))
        return tuple(
            _format(each, f"{self._at}.{name}[{number}]", self._depth + 1)
            for number, each in enumerate(given)
        )

    def tags(self) -> tuple[Tag, ...]:
        found = self.formats("tags")
        for number, each in enumerate(found):
            if not isinstance(each, Tag):
                raise _refused(f"{self._at}.tags[{number}] is no tag")
        return tuple(each for each in found if isinstance(each, Tag))

    def border(self, name: str) -> tuple[Text | Token, ...]:
        """Returns the beginning or the ends of a tag: a text, a token, or a list of texts."""
        given = self._take(name, "a text or a token", lambda v: isinstance(v, (str, Mapping)) or _is_list(v))
        found: list[Text | Token] = []
        for each in given if isinstance(given, list) else [given]:
            read = Text(each) if isinstance(each, str) else _format(each, f"{self._at}.{name}", self._depth)
            if not isinstance(read, (Text, Token)):
                raise _refused(f"{self._at}.{name} is {each!r}; give a text or a token"[:300])
            found.append(read)
        return tuple(found)

    def rules(self) -> tuple[Tag, ...]:
        """Returns the rules of a dispatch: tags without an end."""
        given = self._take(
            "rules", "a list of [text, format]", lambda v: _is_list(v) and _all_of(v, _is_rule)
        )
        return tuple(
            Tag(Text(begin), _format(content, f"{self._at}.rules[{number}]", self._depth + 1), (Text(""),))
            for number, (begin, content) in enumerate(given)
        )

    def end(self) -> None:
        """Refuses fields that nothing read."""
        if self._left:
            names = ", ".join(map(repr, self._left))[:200]
            raise _refused(f"{self._at} has {names}, which is no field of {self.kind}")


def _all_of(value: Any, fits: Callable[[Any], Any]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(fits, value))


def _is_format(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_rule(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and isinstance(value[0], str)
        and bool(value[0])
        and _is_format(value[1])
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 20


def _format(given: Any, at: str, depth: int) -> Format:
    """Returns a format, which stands at a path of the structural tag."""
    if not isinstance(given, Mapping):
        raise _refused(f"{at} is {given!r}"[:200] + '; give {"type": …}')
    if depth > MAX_DEPTH:
        raise _refused(f"{depth} formats inside each other, at most {MAX_DEPTH} are allowed")
    fields = _Fields(given, at, depth)
    read = _READERS.get(fields.kind) if isinstance(fields.kind, str) else None
    if read is None:
        told = _REFUSED.get(fields.kind) if isinstance(fields.kind, str) else None
        why = told or f"known types: {', '.join(_READERS)}"
        raise _refused(f"{at}.type is {str(fields.kind)[:50]!r}, which is not supported; {why}")
    found = read(fields)
    fields.end()
    return found


def _schema(fields: _Fields) -> Schema:
    schema = fields.value("json_schema", "a schema", lambda value: value is True or isinstance(value, dict))
    fields.refuse("style", "json", "only json is")
    fields.refuse("any_order", False, "the properties come in the schema's order")
    fields.refuse("excludes", [], "give the strings of the schema a pattern")
    spaces = fields.count("max_whitespace_cnt", None)
    made = {} if schema is True else dict(schema)
    if spaces is not None:
        options = made.get("x-guidance")
        made["x-guidance"] = {
            **(options if isinstance(options, dict) else {}),
            "whitespace_pattern": f"[ \\t\\n\\r]{{0,{spaces}}}",
        }
    return Schema(made)


def _any_text(fields: _Fields) -> AnyText:
    fields.refuse("max_tokens", None, "give max_chars")
    return AnyText(fields.texts("excludes"), fields.count("max_chars", None))


def _sequence(fields: _Fields) -> Format:
    elements = tuple(each for each in fields.formats("elements") if each != Text(""))
    return Chain(elements) if elements else Text("")


def _repeat(fields: _Fields) -> Repeat:
    least = fields.count("min")
    most = fields.value("max", "a number from min on, or -1 for no limit", lambda v: v == -1 or _is_count(v))
    if 0 <= most < least:
        raise _refused(f"a repeat has min {least} and max {most}; give a max from min on, or -1 for no limit")
    return Repeat(fields.format("content"), least, None if most < 0 else most)


def _tag(fields: _Fields) -> Tag:
    begin = fields.border("begin")
    if len(begin) > 1:
        raise _refused("a tag has several beginnings; give a tag for each")
    content, ends = fields.format("content"), fields.border("end")
    if len(ends) > 1 and Text("") in ends:
        raise _refused("one end of a tag is empty, and others are not; give them, or the empty one alone")
    return Tag(begin[0], content, ends)


def _triggered_tags(fields: _Fields) -> Triggered:
    triggers = fields.value("triggers", "a list of texts", _is_list)
    _check_triggers(triggers)
    return _triggered(
        triggers,
        fields.tags(),
        at_least_one=fields.flag("at_least_one"),
        stop_after_first=fields.flag("stop_after_first"),
        excludes=fields.texts("excludes"),
    )


def _dispatch(fields: _Fields) -> Triggered:
    tags = fields.rules()
    return _triggered(
        [tag.begin.value for tag in tags if isinstance(tag.begin, Text)],
        tags,
        stop_after_first=not fields.flag("loop", True),
        excludes=fields.texts("excludes"),
    )


_READERS: dict[str, Callable[[_Fields], Format]] = {
    "const_string": lambda fields: Text(fields.text("value")),
    "json_schema": _schema,
    "any_text": _any_text,
    "regex": lambda fields: Regex(fields.filled("pattern")),
    "grammar": lambda fields: Grammar(fields.filled("grammar")),
    "token": lambda fields: Token(fields.value("token", "a text or an id", lambda v: type(v) in (str, int))),
    "sequence": _sequence,
    "or": lambda fields: Either(fields.formats("elements")),
    "optional": lambda fields: Repeat(fields.format("content"), 0, 1),
    "plus": lambda fields: Repeat(fields.format("content"), 1, None),
    "star": lambda fields: Repeat(fields.format("content"), 0, None),
    "repeat": _repeat,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": lambda fields: Separated(
        fields.tags(), fields.text("separator"), fields.flag("at_least_one"), fields.flag("stop_after_first")
    ),
    "dispatch": _dispatch,
}
_REFUSED = {
    "qwen_xml_parameter": "arguments are JSON: give a json_schema",
    "exclude_token": "give any_text with excludes",
    "any_tokens": "give any_text, which has no special token",
    "token_triggered_tags": "give triggered_tags, whose triggers may be special tokens",
    "token_dispatch": "give dispatch, whose texts may be special tokens",
}
