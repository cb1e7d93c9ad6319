"""Derivation of a chat format from renderings of its template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from torch_armllm.chat_format.format import (
    ID,
    INDEX,
    TYPE,
    ArgumentFormat,
    CallFormat,
    ChatFormat,
    JsonFormat,
    ReasoningFormat,
    tokens,
)
from torch_armllm.chat_format.probe import (
    CALL_IDS,
    CONTENT,
    KEY,
    KEY2,
    NAME,
    NUMBER,
    OTHER,
    REASONING,
    VALUE,
    Probe,
    Render,
)

_TAG = r"<[^<>\s]+?>|\[/?[A-Z_]+\]"
_PART = r"[^\s\ue000-\ue002]"
_SPLIT = re.compile(rf"\s+|{_TAG}|[\ue000-\ue002]|(?!{_TAG}){_PART}(?:(?!{_TAG}|(?<=>)<){_PART})*")
"""Tags, words, holes and white space; a tag with attributes begins a word."""
_NAMED_REASONING = re.compile(
    r"(?P<left>[<\[◁]\|?)/(?P<name>(?:\w+[:_])?(?:think|thinking|thought|thoughts|reasoning))(?P<right>\|?[>\]▷])",
    re.IGNORECASE,
)
"""The end of an element whose name says that it holds reasoning."""
_KNOWN_REASONING = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ReasoningFormat("Here is my thought process:", "Here is my response:"),
    ReasoningFormat("<reasoning>", "</reasoning>"),
    ReasoningFormat("<thinking>", "</thinking>"),
    ReasoningFormat("<thought>", "</thought>"),
)
"""Tags that a template may mention without rendering reasoning."""
REASONING_TAGS = frozenset(tag for known in _KNOWN_REASONING for tag in (known.begin, known.end))
"""All of them, which a tokenizer may have as tokens."""


def derive(render: Render, template: str = "", vocabulary: Collection[str] = ()) -> ChatFormat:
    """Returns the format that a template's renderings show.

    Args:
        render: renders messages with the template.
        template: its source, searched for tags of reasoning that it does not render.
        vocabulary: the tokenizer's tokens, searched for the same.
    """
    probe = Probe(render)
    content = probe.turn(content=CONTENT)
    if content is None or CONTENT not in content:
        content = CONTENT
    before, _, after = content.partition(CONTENT)
    user_end = "".join(_common(_split(probe.user_end()), _split(before)))
    header = "".join(_common(_split(probe.prompt()), _split(before)))
    reasoning, header = _reasoning(probe, header)
    begun = (known for known in _KNOWN_REASONING if probe.prompt().rstrip().endswith(known.begin))
    reasoning = next(begun, reasoning) or _mentioned(template, vocabulary)
    if reasoning is not None:
        for tag in (reasoning.begin, reasoning.end):
            header = user_end + header[len(user_end) :].partition(tag)[0]
    content_begin = _without_reasoning(before[len(header) :], reasoning)
    one = probe.calls((NAME, {KEY: VALUE}))
    calls = None
    turn_end, content_end = after, ""
    if one is not None:
        ending = _common_end(_split(one), _split(after))
        if content_begin.strip() and (ending or not tokens(after)):
            closing = _split(after[: len(after) - len("".join(ending))])
            if closing:
                closing = _split(after)[: max(len(closing), len(tokens(content_begin)))]
            content_end = "".join(closing)
            turn_end = after[len(content_end) :]
        lead = _after_lead(one, header, before, content_begin, content_end, reasoning)
        calls = _calls(probe, one, lead, turn_end)
    return ChatFormat(
        reasoning=reasoning,
        calls=calls,
        header=header[len(user_end) :].strip(),
        content_begin=content_begin.strip(),
        content_end=content_end.strip(),
        turn_end=turn_end.strip(),
    )


def _split(text: str) -> list[str]:
    return _SPLIT.findall(text)


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Returns the tokens with which two sequences begin alike."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return list(one[:count])


def _common_end(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return _common(one[::-1], other[::-1])[::-1]


def _reasoning(probe: Probe, header: str) -> tuple[ReasoningFormat | None, str]:
    """Returns the markers of reasoning, and the header without the one that opens it."""
    fields = {"reasoning_content": REASONING, "reasoning": REASONING, "thinking": REASONING}
    for turn in (
        probe.turn(content=CONTENT, **fields),
        probe.calls((NAME, {KEY: VALUE}), **fields),
    ):
        if turn is None or REASONING not in turn:
            continue
        before, _, behind = turn.partition(REASONING)
        begin = before.removeprefix(header).strip()
        middle = behind.partition(CONTENT)[0] if CONTENT in behind else behind
        words = tokens(middle)
        if not words:
            continue
        end = _end_of_reasoning(words)
        opening = tokens(begin) if begin else tokens(header)
        count = len(tokens(end))
        begin = begin if begin and len(opening) <= count else _last(before, count)
        if not begin:
            continue
        if not before.removeprefix(header).strip():
            header = header[: header.rindex(begin)] if begin in header else header
        return ReasoningFormat(begin, end), header
    return None, header


def _end_of_reasoning(words: Sequence[str]) -> str:
    """Returns the marker that ends reasoning: its first tag, or three parts as ``<|close|>think<|sep|>``."""
    if len(words) > 2 and words[0].startswith("<|") and not words[1].startswith(("<", "[")):
        return "".join(words[:3])
    return words[0]


def _last(text: str, count: int) -> str:
    """Returns the last tokens of a text, joined."""
    return "".join(tokens(text)[-count:])


def _mentioned(template: str, vocabulary: Collection[str]) -> ReasoningFormat | None:
    for known in _KNOWN_REASONING:
        both = known.begin, known.end
        if any(tag in template for tag in both) or all(tag in vocabulary for tag in both):
            return known
    if (end := _NAMED_REASONING.search(template)) is not None:
        return ReasoningFormat(end["left"] + end["name"] + end["right"], end[0])
    return None


def _without_reasoning(text: str, reasoning: ReasoningFormat | None) -> str:
    if reasoning is None:
        return text
    return text.replace(reasoning.begin, "").replace(reasoning.end, "")


def _after_lead(
    turn: str,
    header: str,
    before: str,
    content_begin: str,
    content_end: str,
    reasoning: ReasoningFormat | None,
) -> int:
    """Returns where the markers of calls begin in a turn: behind the header, empty reasoning and content."""
    parts = _split(turn)
    at = len(_common(parts, _split(before)))
    place = len("".join(parts[:at]))
    content = len(before.rstrip()) - len(content_begin.strip())
    if content < place < len(before.rstrip()):
        place = content  # the markers of calls begin as those of content do
    skipped = [content_begin.strip(), content_end.strip()] if content_end.strip() else []
    skipped += [reasoning.begin, reasoning.end] if reasoning is not None else []
    going = True
    while going:
        rest = turn[place:]
        blank = len(rest) - len(rest.lstrip())
        found = next((each for each in skipped if each and rest[blank:].startswith(each)), None)
        going = found is not None
        place += blank + len(found) if found is not None else 0
    return place


def _calls(probe: Probe, one: str, lead: int, turn_end: str) -> CallFormat | None:
    """Returns the markers of calls."""
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
        return _tagged_calls(probe, body, between)
    return None


def _between(two: str | None, end: str) -> str | None:
    """Returns what a turn of two calls has from the first value to the second name; None if it is refused."""
    if two is None or OTHER not in two or VALUE not in two:
        return None
    first = two.find(VALUE)
    second = two.rfind(OTHER)
    return _with_holes(two[first + len(VALUE) : second]) if first < second else None


def _with_holes(text: str) -> str:
    for each in CALL_IDS:
        text = text.replace(each, ID)
    return text


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
    before, after = body[:begin], body[end:]
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
    section_begin, call_begin, call_end, separator, section_end = _parts(before, rest, after)
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
    return two[first[1] : second[0]]


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
    before, name_end, after = body[:name], _with_holes(body[name + len(NAME) : begin]), body[end:]
    before = _with_holes(before)
    if between is not None:
        # the JSON of the first value ends with a quote and a brace
        between = between[end - body.find(VALUE) - len(VALUE) :]
        section_begin, call_begin, call_end, separator, section_end = _parts(before, between, after)
    else:
        section_begin, call_begin, call_end, separator, section_end = before, "", after, "", ""
    around = re.search(r":\d+", name_end)
    name_end = re.sub(r"(?<=:)\d+", INDEX, name_end, count=1)
    return CallFormat(
        "tag_json", section_begin, call_begin, name_end, call_end, separator, section_end,
        id_around_name=around is not None, parallel=between is not None,
    )  # fmt: skip


def _parts(before: str, between: str, after: str) -> tuple[str, str, str, str, str]:
    """Parts the markers around calls.

    Args:
        before: what is before the first call's name.
        between: what is between a call's end and the next one's name.
        after: what is behind the last call.

    Returns:
        Begin of the section, begin of a call, end of a call, separator, end of the section.
    """
    ahead, middle, behind = _split(before), _split(between), _split(after)
    end = _common(behind, middle)
    begin = _common_end(ahead, middle[len(end) :])
    separator = middle[len(end) : len(middle) - len(begin)]
    section_begin, section_end = ahead[: len(ahead) - len(begin)], behind[len(end) :]
    while begin and begin[0].isspace() and (separator or end):  # white space separates
        separator, section_begin = [*separator, begin[0]], [*section_begin, begin[0]]
        begin = begin[1:]
    joined = ["".join(each) for each in (section_begin, begin, end, separator, section_end)]
    return joined[0], joined[1], joined[2], joined[3], joined[4]


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


def _tagged_calls(probe: Probe, body: str, between: str | None) -> CallFormat | None:
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
    ahead, middle, behind = _split(after_name), _split(separator), _split(after_value)
    value_end = _common(behind, middle)
    key_begin = _common_end(ahead, middle[len(value_end) :])
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
    key_end, string_type, other_type = _typed_key_end(between_both, number)
    if not key_end.strip():
        return None
    argument = ArgumentFormat(
        key_begin="".join(key_begin),
        key_end=key_end.rstrip(),
        value_end=ending.strip(),
        string_type=string_type,
        other_type=other_type,
        before=key_end[len(key_end.rstrip()) :],
        after=ending[: len(ending) - len(ending.lstrip())],
        separator=gap,
    )
    before = _with_holes(body[:name])
    if between is None:
        return CallFormat("tagged", before, "", name_end, rest, argument=argument, parallel=False)
    remaining = between.removeprefix(ending)
    section_begin, begin, end, gap, section_end = _parts(before, remaining, rest)
    index = re.compile(r'(?<==")\d+(?=")')
    return CallFormat(
        "tagged", section_begin, begin, index.sub(INDEX, _with_holes(name_end)), end, gap, section_end,
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
