"""Markers of tool calls, found in what a template renders."""

from __future__ import annotations

import json
import re

from torch_armllm.chat_format.argument_markers import NUMBER_ATTRIBUTE, tagged_calls
from torch_armllm.chat_format.format import INDEX, CallFormat, JsonFormat
from torch_armllm.chat_format.probe import KEY, NAME, OTHER, VALUE, Probe
from torch_armllm.chat_format.rendered_parts import markers_around, with_holes


def call_markers(probe: Probe, one: str, lead: int, turn_end: str) -> CallFormat | None:
    """Returns the markers of calls; None if they are not understood.

    Args:
        probe: renders further calls.
        one: what the template writes for a message with a call.
        lead: where the markers of calls begin in it.
        turn_end: what the template writes behind a message.
    """
    body = one[lead:]
    two = probe.calls((NAME, {KEY: VALUE}), (OTHER, {KEY: VALUE}))
    end = turn_end if turn_end.strip() and body.endswith(turn_end) else ""
    body = body[: len(body) - len(end)]
    name, value = body.find(NAME), body.find(VALUE)
    if name < 0 or value < 0:
        return None
    between = _between(two, end)
    found = _json_around(body, name)
    if found is not None:
        return _json_calls(body, *found, two, between)
    found = _json_around(body, value)
    if found is not None and found[0] > name:
        return _tag_json_calls(body, *found, between)
    if (written := _python(body, two)) is not None:
        return written
    if name < body.find(KEY) < value:
        return tagged_calls(probe, body, between)
    return None


def _between(two: str | None, end: str) -> str | None:
    """Returns what a turn of two calls has from the first value to the second name; None if it is refused."""
    if two is None or OTHER not in two or VALUE not in two:
        return None
    first = two.find(VALUE)
    second = two.rfind(OTHER)
    return with_holes(two[first + len(VALUE) : second]) if first < second else None


def _json_around(text: str, position: int) -> tuple[int, int] | None:
    """Returns begin and end of the outermost JSON value around a position."""
    decoder = json.JSONDecoder()
    for bracket in re.finditer(r"[{\[]", text[:position]):
        try:
            _, end = decoder.raw_decode(text, bracket.start())
        except (ValueError, RecursionError):
            continue
        if end > position:
            return bracket.start(), end
    return None


def _json_calls(body: str, begin: int, end: int, two: str | None, between: str | None) -> CallFormat | None:
    value = json.loads(body[begin:end])
    is_list = isinstance(value, list)
    if is_list and len(value) != 1:
        return None
    call = value[0] if is_list else value
    fields = _fields(call)
    if fields is None:
        return None
    name, arguments, call_id, wrapper = fields
    before, after = _numbered(body[:begin]), _numbered(body[end:])
    layout_begin, layout_end = _object_in(body[begin:end]) if is_list else (0, end - begin)
    layout = body[begin:end][layout_begin:layout_end]
    json_format = JsonFormat(name, arguments, call_id, wrapper, is_list, layout)
    if is_list:
        inside = body[begin:end]
        section = before + inside[:layout_begin], inside[layout_end:] + after
        separator = ", " if two is None else _between_items(two)
        parallel = between is not None
        return CallFormat(
            "json", section[0], "", "", "", separator, section[1], json_format, parallel=parallel
        )
    if two is None or between is None:
        return CallFormat("json", before, "", "", "", "", after, json_format, parallel=False)
    rest = _between_values(two)
    if rest is None:
        return CallFormat("json", before, "", "", after, "", "", json_format)
    section_begin, call_begin, call_end, separator, section_end = markers_around(before, rest, after)
    return CallFormat("json", section_begin, call_begin, "", call_end, separator, section_end, json_format)


def _between_items(two: str) -> str:
    """Returns what is between two calls in a list."""
    found = _json_around(two, two.find(NAME))
    if found is None or OTHER not in two[found[0] : found[1]]:
        return ", "
    text = two[found[0] : found[1]]
    end = _object_in(text)[1]
    return text[end : text.index("{", end)]


def _object_in(text: str) -> tuple[int, int]:
    """Returns begin and end of the first object in the text of a list."""
    begin = text.index("{")
    return begin, json.JSONDecoder().raw_decode(text, begin)[1]


def _between_values(two: str) -> str | None:
    """Returns what is between the JSON values of two calls."""
    first = _json_around(two, two.find(NAME))
    second = _json_around(two, two.rfind(OTHER))
    if first is None or second is None or first[1] > second[0]:
        return None
    return _numbered(two[first[1] : second[0]])


def _numbered(text: str) -> str:
    """Returns a text with holes in the place of ids and of numbers in attributes."""
    return NUMBER_ATTRIBUTE.sub(INDEX, with_holes(text))


def _fields(call: object) -> tuple[str, str, str, str] | None:
    """Returns the fields of a call: its name, arguments, id, and what both are in."""
    if not isinstance(call, dict):
        return None
    if NAME in call:
        return "", "", "", ""
    name = next((key for key, value in call.items() if value == NAME), None)
    if name is not None:
        holds = (key for key, value in call.items() if isinstance(value, dict) and KEY in value)
        arguments = next(holds, None)
        call_id = next(
            (key for key, value in call.items() if key not in (name, arguments) and ("id" in key.lower())), ""
        )
        return None if arguments is None else (name, arguments, call_id, "")
    for key, value in call.items():
        if isinstance(value, dict) and (inner := _fields(value)) is not None and inner[0] and not inner[3]:
            return inner[0], inner[1], next((each for each in call if "id" in each.lower()), ""), key
    return None


def _tag_json_calls(body: str, begin: int, end: int, between: str | None) -> CallFormat:
    name = body.find(NAME)
    before, name_end, after = body[:name], with_holes(body[name + len(NAME) : begin]), body[end:]
    before = with_holes(before)
    if between is not None:
        # the JSON of the first value ends with a quote and a brace
        between = between[end - body.find(VALUE) - len(VALUE) :]
        section_begin, call_begin, call_end, separator, section_end = markers_around(before, between, after)
    else:
        section_begin, call_begin, call_end, separator, section_end = before, "", after, "", ""
    around = re.search(r":\d+", name_end)
    name_end = re.sub(r"(?<=:)\d+", INDEX, name_end, count=1)
    return CallFormat(
        "tag_json", section_begin, call_begin, name_end, call_end, separator, section_end,
        id_around_name=around is not None, parallel=between is not None,
    )  # fmt: skip


def _python(body: str, two: str | None) -> CallFormat | None:
    """Returns the markers of ``[name(key='value')]``."""
    arguments = rf"\(\s*{KEY}\s*=\s*(['\"]){VALUE}\1\s*\)"
    call = re.search(NAME + arguments, body)
    if call is None:
        return None
    both = re.search(rf"{NAME}{arguments}(.*?){OTHER}\(", two or "", re.DOTALL)
    separator = ", " if both is None else both[2]
    section = body[: call.start()], body[call.end() :]
    return CallFormat(
        "python", section[0], separator=separator, section_end=section[1], parallel=both is not None
    )
