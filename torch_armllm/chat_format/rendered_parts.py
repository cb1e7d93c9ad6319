"""Parts of what a template renders: tags, words, holes and white space, and the markers that they make."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_armllm.chat_format.format import ID, TAG
from torch_armllm.chat_format.probe import CALL_IDS

_PART = r"[^\s\ue000-\ue002]"
_SPLIT = re.compile(rf"\s+|{TAG}|[\ue000-\ue002]|(?!{TAG}){_PART}(?:(?!{TAG}|(?<=>)<){_PART})*")
"""Tags, words, holes and white space; a tag with attributes begins a word."""


def split_parts(text: str) -> list[str]:
    """Splits a text into parts, which joined are the text."""
    return _SPLIT.findall(text)


def common_begin(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Returns the tokens with which two sequences begin alike."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return list(one[:count])


def common_end(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Returns the tokens with which two sequences end alike."""
    return common_begin(one[::-1], other[::-1])[::-1]


def with_holes(text: str) -> str:
    """Returns a text with holes in the place of the ids of calls."""
    for each in CALL_IDS:
        text = text.replace(each, ID)
    return text


def markers_around(before: str, between: str, after: str) -> tuple[str, str, str, str, str]:
    """Parts the markers around calls.

    Args:
        before: what is before the first call's name.
        between: what is between a call's end and the next one's name.
        after: what is behind the last call.

    Returns:
        Begin of the section, begin of a call, end of a call, separator, end of the section.
    """
    ahead, middle, behind = split_parts(before), split_parts(between), split_parts(after)
    end = common_begin(behind, middle)
    begin = common_end(ahead, middle[len(end) :])
    separator = middle[len(end) : len(middle) - len(begin)]
    section_begin, section_end = ahead[: len(ahead) - len(begin)], behind[len(end) :]
    while begin and begin[0].isspace() and (separator or end):  # white space separates
        separator, section_begin = [*separator, begin[0]], [*section_begin, begin[0]]
        begin = begin[1:]
    joined = ["".join(each) for each in (section_begin, begin, end, separator, section_end)]
    return joined[0], joined[1], joined[2], joined[3], joined[4]
