"""Derivation of a chat format from renderings of its template."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from torch_armllm.chat_format.call_markers import call_markers
from torch_armllm.chat_format.format import ChatFormat, ReasoningFormat, tokens
from torch_armllm.chat_format.probe import CONTENT, KEY, NAME, REASONING, VALUE, Probe, Render
from torch_armllm.chat_format.rendered_parts import common_begin, common_end, split_parts

_NAMED_REASONING = re.compile(
    r"(?P<left>[<\[◁]\|?)/(?P<name>(?:\w+[:_])?(?:think|thinking|thought|thoughts|reasoning))(?P<right>\|?[>\]▷])",
    re.IGNORECASE,
)
"""The end of an element whose name says that it holds reasoning."""
_SPLIT = re.compile(r"split\(\s*(['\"])([^'\"\n]+)\1")
"""Texts at which a template splits others."""
_ENDS_TO_BEGINNINGS = (("end", "begin"), ("end", "start"), ("END", "BEGIN"), ("END", "START"))
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
    user_end = "".join(common_begin(split_parts(probe.user_end()), split_parts(before)))
    header = "".join(common_begin(split_parts(probe.prompt()), split_parts(before)))
    reasoning, header = _reasoning(probe, header)
    begun = (known for known in _KNOWN_REASONING if probe.prompt().rstrip().endswith(known.begin))
    reasoning = next(begun, reasoning) or _mentioned(template, vocabulary) or _cut_off(probe, template)
    if reasoning is not None:
        for tag in (reasoning.begin, reasoning.end):
            header = user_end + header[len(user_end) :].partition(tag)[0]
    content_begin = _without_reasoning(before[len(header) :], reasoning)
    one = probe.calls((NAME, {KEY: VALUE}))
    calls = None
    turn_end, content_end = after, ""
    if one is not None:
        ending = common_end(split_parts(one), split_parts(after))
        if content_begin.strip() and (ending or not tokens(after)):
            closing = split_parts(after[: len(after) - len("".join(ending))])
            if closing:
                closing = split_parts(after)[: max(len(closing), len(tokens(content_begin)))]
            content_end = "".join(closing)
            turn_end = after[len(content_end) :]
        lead = _after_lead(one, header, before, content_begin, content_end, reasoning)
        calls = call_markers(probe, one, lead, turn_end)
    return ChatFormat(
        reasoning=reasoning,
        calls=calls,
        header=header[len(user_end) :].strip(),
        content_begin=content_begin.strip(),
        content_end=content_end.strip(),
        turn_end=turn_end.strip(),
    )


def _reasoning(probe: Probe, header: str) -> tuple[ReasoningFormat | None, str]:
    """Returns the markers of reasoning, and the header without the one that opens it."""
    fields = {"reasoning_content": REASONING, "reasoning": REASONING, "thinking": REASONING}
    for turn in (probe.turn(content=CONTENT, **fields), probe.calls((NAME, {KEY: VALUE}), **fields)):
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


def _cut_off(probe: Probe, template: str) -> ReasoningFormat | None:
    """Returns the markers of reasoning that a template cuts off the content, in front of the end of it."""
    for _, end in _SPLIT.findall(template):
        turn = probe.turn(content=f"{REASONING}{end}{CONTENT}")
        if not end.strip() or turn is None or REASONING in turn or CONTENT not in turn:
            continue
        begins = [end.replace("/", "", 1), *(end.replace(one, other) for one, other in _ENDS_TO_BEGINNINGS)]
        begins = [begin for begin in begins if begin != end]
        begin = next((begin for begin in begins if begin in template), next(iter(begins), None))
        if begin is not None:
            return ReasoningFormat(begin, end)
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
    parts = split_parts(turn)
    at = len(common_begin(parts, split_parts(before)))
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
