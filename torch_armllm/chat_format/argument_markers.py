"""Markers of calls whose names, keys and values stand between tags, found in what a template renders."""

from __future__ import annotations

import re

from torch_armllm.chat_format.format import INDEX, TYPE, ArgumentFormat, CallFormat, Kind
from torch_armllm.chat_format.probe import KEY, KEY2, NAME, NUMBER, VALUE, Probe
from torch_armllm.chat_format.rendered_parts import (
    common_begin,
    common_end,
    markers_around,
    split_parts,
    with_holes,
)

NUMBER_ATTRIBUTE = re.compile(r'(?<==")\d+(?=")')
"""The number of a call."""


def tagged_calls(probe: Probe, body: str, between: str | None) -> CallFormat | None:
    """Returns the markers of keys and values, from calls with two arguments and with a number."""
    name, key, value = body.find(NAME), body.find(KEY), body.find(VALUE)
    after_name, between_both, after_value = (
        body[name + len(NAME) : key],
        body[key + len(KEY) : value],
        body[value + len(VALUE) :],
    )
    two_arguments = probe.calls((NAME, {KEY: VALUE, KEY2: VALUE}))
    number = probe.calls((NAME, {KEY: NUMBER}))
    if two_arguments is None or KEY2 not in two_arguments:
        return None
    first = two_arguments.find(VALUE)
    separator = two_arguments[first + len(VALUE) : two_arguments.find(KEY2)]
    ahead, middle, behind = split_parts(after_name), split_parts(separator), split_parts(after_value)
    value_end = common_begin(behind, middle)
    key_begin = common_end(ahead, middle[len(value_end) :])
    name_end = "".join(ahead[: len(ahead) - len(key_begin)])
    rest = "".join(behind[len(value_end) :])
    gap = "".join(middle[len(value_end) : len(middle) - len(key_begin)])
    while key_begin and key_begin[0].isspace():
        gap, name_end, key_begin = gap + key_begin[0], name_end + key_begin[0], key_begin[1:]
    while value_end and value_end[-1].isspace():
        gap, rest, value_end = value_end[-1] + gap, value_end[-1] + rest, value_end[:-1]
    if not value_end or not key_begin:
        return None
    ending = "".join(value_end)
    kind: Kind = "tagged"
    if (prefix := ending.strip().removesuffix(f"</{KEY}>")) != ending.strip() and not gap.strip():
        kind, key_begin = "nested", [f"{prefix}<"]
    key_end, string_type, other_type = _typed_key_end(between_both, number)
    if not key_end.strip():
        return None
    argument = ArgumentFormat(
        key_begin="".join(key_begin),
        key_end=key_end.rstrip(),
        value_end=ending.strip() if kind == "tagged" else ending.strip().removesuffix(f"{KEY}>"),
        string_type=string_type,
        other_type=other_type,
        before=key_end[len(key_end.rstrip()) :],
        after=ending[: len(ending) - len(ending.lstrip())],
        separator=gap,
    )
    before = with_holes(body[:name])
    if between is None:
        return CallFormat(kind, before, "", name_end, rest, argument=argument, parallel=False)
    remaining = between.removeprefix(ending)
    section_begin, begin, end, gap, section_end = markers_around(before, remaining, rest)
    return CallFormat(
        kind, section_begin, begin, NUMBER_ATTRIBUTE.sub(INDEX, with_holes(name_end)), end, gap, section_end,
        argument=argument,
    )  # fmt: skip


def _typed_key_end(text: str, number: str | None) -> tuple[str, str | None, str | None]:
    """Returns what is between key and value, with a hole for the type, and types of a string and a number."""
    if number is None or str(NUMBER) not in number or KEY not in number:
        return text, None, None
    other = number[number.rfind(KEY) + len(KEY) : number.find(str(NUMBER))]
    if other == text:
        return text, None, None
    words, others = re.split(r"(\w+)", text), re.split(r"(\w+)", other)
    differ = [i for i, (one, two) in enumerate(zip(words, others, strict=False)) if one != two]
    if len(words) != len(others) or len(differ) != 1 or not differ[0] % 2:
        return text, None, None
    string_type, other_type = words[differ[0]], others[differ[0]]
    words[differ[0]] = TYPE
    return "".join(words), string_type, other_type
