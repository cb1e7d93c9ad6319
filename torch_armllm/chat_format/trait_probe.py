"""Finds the traits of a chat template: renders it with sentinels, and sees which of them it shows."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Protocol

from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.known import known
from torch_armllm.chat_format.probe_messages import (
    KEY,
    LONG_IDS,
    MORE,
    NAME,
    OTHER_RESULT,
    OTHER_VALUE,
    RESULT,
    ROLE,
    SAID,
    SHORT_IDS,
    SYSTEM,
    THOUGHT,
    USER,
    USER_TURN,
    VALUE,
    call,
    calling,
    result,
    tools_variable,
    turn_of,
)
from torch_armllm.chat_format.template_switches import template_switches, thinking_variables
from torch_armllm.chat_format.template_traits import (
    EMPTY,
    ROLES,
    ArgumentForm,
    Message,
    ReasoningField,
    ReasoningMarks,
    TemplateTraits,
    with_reasoning,
)
from torch_armllm.engine.text.reasoning_tags import REASONING_PARSERS
from torch_armllm.engine.text.template_process import SHARED, TemplateBoundError, TemplateError

_FIELDS: tuple[ReasoningField, ...] = ("reasoning_content", "thinking", "part")
_MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""A tag of any kind."""


class Render(Protocol):
    """Renders a template.

    Raises:
        TemplateError: the template raised an error.
        ValueError: it raised a ValueError, or exceeds a bound.
    """

    def __call__(self, messages: Sequence[Message], **variables: Any) -> str:
        """Returns the text of a conversation, with the template's variables."""
        ...


@lru_cache(maxsize=32)
def traits_of(template: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateTraits:
    """Returns the traits of a template, which it renders in the process of templates the first time.

    Args:
        template: its text.
        special_tokens: names and texts of the tokenizer's special tokens.

    Raises:
        TemplateBoundError: the template exceeds a bound.
        RuntimeError: the process does not start.
    """

    def render(messages: Sequence[Message], **variables: Any) -> str:
        given = {"tools": None, "add_generation_prompt": False, **dict(special_tokens), **variables}
        return SHARED.render(conversations=[list(messages)], chat_template=template, **given)

    return find_traits(template, render)


def find_traits(template: str, render: Render) -> TemplateTraits:
    """Returns the traits of a template; the defaults, if it renders no conversation.

    Args:
        template: its text.
        render: renders it.

    Raises:
        TemplateBoundError: the template exceeds a bound.
    """
    probe = _TraitProbe(template, render)
    return TemplateTraits(switches=probe.switches, **probe.traits())


class _TraitProbe:
    def __init__(self, template: str, render: Render) -> None:
        self._template = template
        self._render = render
        self._variables: dict[str, Any] = {}
        self._tools: tuple[str, bool] | None = None
        self.switches = template_switches(template)

    def traits(self) -> dict[str, Any]:
        """Returns the fields of `TemplateTraits`; none for a template that renders no conversation."""
        basic = self._basic()
        if basic is None:
            return {}
        return {**basic, **self._of_tools(), **self._of_roles(), **self._of_calls(), **self._of_reasoning()}

    def _text(self, *messages: Message, **variables: Any) -> str | None:
        """Returns what the template writes; None if it refuses the conversation."""
        try:
            return self._render(messages, **{**self._variables, **variables})
        except TemplateBoundError:
            raise  # no trait: it depends on the machine, and the next conversation finds out
        except (TemplateError, ValueError):
            return None

    def _shows(self, words: Sequence[str], *messages: Message, **variables: Any) -> bool:
        text = self._text(*messages, **variables)
        return text is not None and all(word in text for word in words)

    def _basic(self) -> dict[str, Any] | None:
        """Finds the variables without which nothing is rendered."""
        named = [name for name in self.switches if "date" in name or "time" in name]
        filled = dict.fromkeys(named, time.strftime("%d %B %Y"))
        for lists, variables in product((False, True), ({}, filled, {**filled, "functions": "[]"})):
            given = {**variables, **({"tools": []} if lists else {})}
            if self._text(USER_TURN, **given) is not None:
                self._variables = given
                kept = {**variables, **(dict.fromkeys(named, "") if variables else {})}
                return {"needs_tool_list": lists, "variables": tuple(kept.items())}
        return None

    # -- tools ---------------------------------------------------------------------------------------------

    def _of_tools(self) -> dict[str, Any]:
        names = ("tools", *(name for name in self.switches if "tool" in name or "function" in name))
        for name, as_text in product(names, (False, True)):
            if self._shows([NAME], USER_TURN, **tools_variable(name, as_text)):
                self._tools = name, as_text
                break
        if self._tools is None:
            return {"tools_variable": None}
        return {
            "tools_variable": self._tools[0],
            "tools_as_text": self._tools[1],
            "needs_description": not self._shows_tool("description"),
            "needs_details": not self._shows_tool("details"),
            "needs_parameters": not self._shows_tool("parameters"),
        }

    def _shows_tool(self, without: str) -> bool:
        assert self._tools is not None
        return self._shows([NAME], USER_TURN, **tools_variable(*self._tools, without))

    # -- roles and contents --------------------------------------------------------------------------------

    def _of_roles(self) -> dict[str, Any]:
        system: Message = {"role": "system", "content": SYSTEM}
        more: Message = {"role": "system", "content": MORE}
        said: Message = {"role": "assistant", "content": SAID}
        user_twice = self._shows([USER, MORE], USER_TURN, {"role": "user", "content": MORE})
        said_twice = self._shows([SAID, MORE], USER_TURN, said, {"role": "assistant", "content": MORE})
        repeats = {"user": user_twice, "assistant": said_twice}
        return {
            "shows_system": self._shows([SYSTEM, USER], system, USER_TURN),
            "shows_systems": self._shows([SYSTEM, MORE, USER], system, more, USER_TURN),
            "shows_late_system": self._shows([SYSTEM, MORE], system, USER_TURN, said, more, USER_TURN),
            "knows_developer": self._knows_developer(),
            "repeats": frozenset(role for role, may in repeats.items() if may),
        }

    def _knows_developer(self) -> bool:
        """True if a developer's message is shown, and not as that of any other role would be."""
        shown = self._text({"role": "developer", "content": SYSTEM}, USER_TURN)
        if shown is None or SYSTEM not in shown:
            return False
        other = self._text({"role": ROLE, "content": SYSTEM}, USER_TURN)
        return other is None or other.replace(ROLE, "developer") != shown

    def _content_roles(self, calls: Message | None) -> dict[str, Any]:
        """Finds whose contents may be lists of parts, and whose may be texts."""
        texts, parts = set(), set()
        for role in ROLES:
            if self._shows([SAID], *turn_of(role, SAID, calls)):
                texts.add(role)
            both = [{"type": "text", "text": word} for word in (SAID, MORE)]
            shown = self._text(*turn_of(role, both, calls))
            if shown and SAID in shown and MORE in shown and not re.search(rf"text\W+{SAID}", shown):
                parts.add(role)
        return {"part_roles": frozenset(parts), "text_roles": frozenset(texts | (set(ROLES) - parts))}

    # -- calls and their results ---------------------------------------------------------------------------

    def _of_calls(self) -> dict[str, Any]:
        tools = tools_variable(*self._tools) if self._tools else {}
        form = self._call_form(tools)
        if form is None:
            given = result(RESULT, LONG_IDS[0])
            shown = self._shows([RESULT], USER_TURN, {"role": "assistant", "content": SAID}, given)
            calls = known(self._template, ChatFormat()).calls
            return {"shows_calls": False, "calls": calls, "shows_results": shown, **self._content_roles(None)}
        arguments, content, ids = form
        one = calling([call(arguments, ids[0])], content)
        both = [call(arguments, ids[0]), call(arguments, ids[1], OTHER_VALUE)]
        results = [result(RESULT, ids[0]), result(OTHER_RESULT, ids[1])]
        two = calling(both, content)
        ordered = self._text(USER_TURN, two, *results, **tools)
        empty = [each for each in EMPTY if self._is_harmless(arguments, each, ids[0], tools)]
        raw = call("text", ids[0])
        raw["function"]["arguments"] = f'{VALUE}"{MORE}'
        after = {"role": "user", "content": MORE}
        return {
            "arguments": arguments,
            "raw_arguments": self._shows([f'{VALUE}"{MORE}'], USER_TURN, calling([raw], content), **tools),
            "empty_contents": tuple(empty) or (content,),
            "calls_beside_content": self._shows(
                [VALUE], USER_TURN, calling([call(arguments, ids[0])], SAID), results[0], **tools
            ),
            "several_calls": ordered is not None and VALUE in ordered and OTHER_VALUE in ordered,
            "short_ids": ids is SHORT_IDS,
            "shows_results": self._shows([RESULT], USER_TURN, one, results[0], **tools),
            "positional_results": ordered is None or ordered.count(ids[0]) < 2,
            "user_after_result": self._shows([RESULT, MORE], USER_TURN, one, results[0], after, **tools),
            **self._content_roles(one),
        }

    def _call_form(self, tools: Mapping[str, Any]) -> tuple[ArgumentForm, str | None, tuple[str, str]] | None:
        """Returns the form in which calls are shown: arguments, content and ids; None: they are not."""
        forms: tuple[ArgumentForm, ...] = ("object", "text")
        for ids, arguments, content in product((LONG_IDS, SHORT_IDS), forms, EMPTY):
            if self._is_harmless(arguments, content, ids[0], tools):
                return arguments, content, ids
        return None

    def _is_harmless(
        self, arguments: ArgumentForm, content: str | None, call_id: str, tools: Mapping[str, Any]
    ) -> bool:
        """True if a call is shown, and neither its arguments nor its content as Python writes them."""
        said = calling([call(arguments, call_id)], content)
        shown = self._text(USER_TURN, said, result(RESULT, call_id), **tools)
        if shown is None or VALUE not in shown:
            return False
        plain = self._text(USER_TURN, **tools) or ""
        return all(shown.count(text) <= plain.count(text) for text in ("None", f"{{'{KEY}'"))

    # -- reasoning -----------------------------------------------------------------------------------------

    def _of_reasoning(self) -> dict[str, Any]:
        tools = tools_variable(*self._tools) if self._tools else {}
        form = self._call_form(tools)
        calls = [] if form is None else [call(form[0], form[2][0])]
        said: Message = {"role": "assistant", "content": SAID}
        turns: list[tuple[Message, dict[str, Any]]] = [(said, {})] + (
            [(calling(calls, form[1]), tools)] if form else []
        )
        for field, (turn, given), shown in product(_FIELDS, turns, ({}, thinking_variables(self.switches))):
            message = with_reasoning(turn, THOUGHT, field)
            after = [result(RESULT, form[2][0])] if form and turn is not said else []
            text = self._text(USER_TURN, message, *after, **{**given, **shown})
            if text is None or THOUGHT not in text or re.search(rf"thinking\W+{THOUGHT}", text):
                continue
            full = with_reasoning(calling(calls, SAID), THOUGHT, field)
            beside = not calls or self._shows([VALUE], USER_TURN, full, **tools)
            return {
                "reasoning": field,
                "reasoning_beside_calls": beside,
                "marks": _marks(text) or self._known_marks(),
            }
        return {"reasoning": None, "marks": self._known_marks()}

    def _known_marks(self) -> ReasoningMarks | None:
        """Returns marks that the template's text names."""
        for tags in REASONING_PARSERS.values():
            if tags.end in self._template:
                return ReasoningMarks(tags.begin, tags.end)
        return None


def _marks(text: str) -> ReasoningMarks | None:
    """Returns the marks around the reasoning of a rendered conversation."""
    before, _, after = text.rpartition(THOUGHT)
    begin = list(_MARK.finditer(before))
    end = _MARK.search(after)
    if not begin or end is None:
        return None
    content = after.find(SAID, end.end())
    between = after[:content] if content >= 0 else after[: end.end()]
    return ReasoningMarks(before[begin[-1].start() :], between)
