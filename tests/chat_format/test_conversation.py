"""Conversations in the forms that templates take, each found as a trait."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from torch_armllm.chat_format.continuation import continued
from torch_armllm.chat_format.conversation import DATE, fit
from torch_armllm.chat_format.template_traits import Message, ReasoningMarks, TemplateTraits

ALL = TemplateTraits()
ASK: Message = {"role": "user", "content": "ask"}


def call(call_id: str | None = "c1", name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else {"id": call_id, **made}


def said(content: Any = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def result(text: Any, call_id: str | None = "c1") -> Message:
    made = {"role": "tool", "content": text}
    return made if call_id is None else {**made, "tool_call_id": call_id}


def told(messages: list[Message], **traits: Any) -> tuple[list[tuple[str, Any]], list[str]]:
    conversation = fit(messages, None, replace(ALL, **traits))
    return [(each["role"], each["content"]) for each in conversation.messages], conversation.warnings


def test_developers_become_the_system() -> None:
    messages = [{"role": "developer", "content": "dev"}, ASK]
    assert told(messages) == ([("system", "dev"), ("user", "ask")], [])
    assert told(messages, knows_developer=True)[0][0] == ("developer", "dev")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("ask", "sys\n\nask"),
        ([{"type": "text", "text": "ask"}], "sys\nask"),
        (
            [{"type": "image_url", "image_url": {"url": "u"}}],
            [{"type": "text", "text": "sys"}, {"type": "image_url", "image_url": {"url": "u"}}],
        ),
    ],
)
def test_systems_that_are_not_shown_come_before_the_user(asked: Any, expected: Any) -> None:
    messages = [{"role": "system", "content": "sys"}, said("hello"), {"role": "user", "content": asked}]
    found, (warning,) = told(messages, shows_system=False)
    assert found == [("assistant", "hello"), ("user", expected)]
    assert "shows no system message" in warning and warning.isascii()
    alone = told(messages[:1], shows_system=False)[0]
    assert alone == [("user", "sys")]


def test_several_systems() -> None:
    first, second = {"role": "system", "content": "one"}, {"role": "developer", "content": "two"}
    assert told([first, second, ASK], shows_systems=False) == (
        [("system", "one\n\ntwo"), ("user", "ask")],
        [],
    )
    late, (warning,) = told([ASK, said("yes"), second, ASK], shows_late_system=False)
    assert late == [("user", "ask"), ("assistant", "yes"), ("user", "two\n\nask")]
    assert "between others" in warning
    assert told([ASK, second], shows_late_system=False)[0] == [("user", "ask\n\ntwo")]
    assert told([said("x"), second], shows_late_system=False)[0] == [("assistant", "x"), ("user", "two")]


def test_late_systems_stay_where_they_are_when_turns_are_added() -> None:
    late = {"role": "system", "content": "late"}
    turns = [
        ASK,
        late,
        said("a", tool_calls=[call()]),
        late,
        result("c"),
        late,
        said("b"),
        late,
        ASK,
        said("c"),
    ]
    whole, _ = told(turns, shows_late_system=False)
    assert whole == [
        ("user", "ask\n\nlate"),
        ("assistant", "a"),
        ("tool", "c"),
        ("user", "late\n\nlate"),
        ("assistant", "b"),
        ("user", "late\n\nask"),
        ("assistant", "c"),
    ]
    for count in (2, 6, 9):  # where the assistant is asked
        part, _ = told(turns[:count], shows_late_system=False)
        assert part == whole[: len(part)]


def test_turns_that_follow_themselves() -> None:
    several = [ASK, ASK, said("a", reasoning="r"), said("b", tool_calls=[call()]), result("c"), ASK]
    assert [role for role, _ in told(several)[0]] == [
        "user",
        "user",
        "assistant",
        "assistant",
        "tool",
        "user",
    ]
    found, (warning,) = told(several, repeats=frozenset(), user_after_result=False)
    assert found == [("user", "ask\n\nask"), ("assistant", "a\n\nb"), ("tool", "c\n\nask")]
    assert "result of a tool" in warning


@pytest.mark.parametrize(
    ("text", "traits", "expected"),
    [
        ('{"a": 1}', {}, {"a": 1}),
        ("", {}, {}),
        (json.dumps('{"a": 1}'), {}, {"a": 1}),
        ('{"a": "x', {}, {"a": "x"}),
        ('{"a": "x', {"raw_arguments": True}, '{"a": "x'),
        ('{"a": 1}', {"arguments": "text"}, '{"a": 1}'),
        ("", {"arguments": "text"}, "{}"),
        ("[1]", {}, {"invalid_json": "[1]"}),
        ("[1]", {"raw_arguments": True}, "[1]"),
        ('{"a": 1} and more', {}, {"invalid_json": '{"a": 1} and more'}),
        ("[" * 100_000, {}, {"invalid_json": "[" * 100_000}),
    ],
)
def test_arguments(text: str, traits: dict[str, Any], expected: Any) -> None:
    messages = [ASK, said(tool_calls=[call(arguments=text)])]
    conversation = fit(messages, None, replace(ALL, **traits))
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == expected


def test_results_get_the_names_ids_and_order_of_their_calls() -> None:
    calls = [call("a", "f"), call("b", "g")]
    swapped = [said(tool_calls=calls), result("2", "b"), result("1", "a"), result("?", "z"), ASK]
    kept = fit(swapped, None, ALL).messages
    assert [(m["content"], m.get("name")) for m in kept[1:4]] == [("2", "g"), ("1", "f"), ("?", None)]
    ordered = fit(swapped, None, replace(ALL, positional_results=True)).messages
    assert [m["content"] for m in ordered] == ["", "1", "2", "?", "ask"]

    missing = [said(tool_calls=[call(None), call(None, "g")]), result("1", None), result("2", None)]
    asked, *answers = fit(missing, None, ALL).messages
    assert [m["tool_call_id"] for m in answers] == [each["id"] for each in asked["tool_calls"]]
    assert [m["name"] for m in answers] == ["f", "g"]


def test_ids_are_kept_unless_the_template_refuses_them() -> None:
    calls = [call("functions.f:0"), call("abcdefgh9"), call("call_0123456789")]
    messages = [said(tool_calls=calls), *(result("x", each["id"]) for each in calls)]
    for short in (False, True):
        asked, *answers = fit(messages, None, replace(ALL, short_ids=short)).messages
        ids = [each["id"] for each in asked["tool_calls"]]
        assert ids == [m["tool_call_id"] for m in answers] and len(set(ids)) == 3
        assert ids[1] == "abcdefgh9"
        assert all(len(each) == 9 and each.isalnum() for each in ids) == short


def test_several_calls_become_turns_of_one() -> None:
    calls = [call("a"), call("b")]
    messages = [said("see", reasoning="r", tool_calls=calls), result("2", "b"), result("1", "a"), ASK]
    found = fit(messages, None, replace(ALL, several_calls=False)).messages
    assert [(m["role"], m["content"]) for m in found] == [
        ("assistant", "see"),
        ("tool", "1"),
        ("assistant", ""),
        ("tool", "2"),
        ("user", "ask"),
    ]
    assert [m.get("reasoning_content") for m in found[::2]] == ["r", None, None]


def test_calls_that_are_not_shown_are_written_out() -> None:
    messages = [
        ASK,
        said("see", tool_calls=[call(arguments='{"a": 1}'), call("c2")]),
        result("1"),
        result("2", "c2"),
    ]
    found, warnings = told(messages, shows_calls=False, shows_results=False, repeats=frozenset())
    assert found == [
        ("user", "ask"),
        ("assistant", 'see\n\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}'),
        ("user", "Result of f:\n1\n\nResult of f:\n2"),
    ]
    assert len(warnings) == 2
    apart = told(messages[:3], calls_beside_content=False)[0]
    assert apart == [("user", "ask"), ("assistant", "see"), ("assistant", ""), ("tool", "1")]


def test_empty_contents() -> None:
    for given in (None, ""):
        assert told([said(given, tool_calls=[call()])])[0] == [("assistant", given)]
        assert told([said(given, tool_calls=[call()])], empty_contents=("",))[0] == [("assistant", "")]
        assert told([said(given, tool_calls=[call()])], empty_contents=(None,))[0] == [("assistant", None)]
        assert told([said(given)], empty_contents=(None,))[0] == [("assistant", "")]


def test_reasoning_is_where_the_template_reads_it() -> None:
    def message(**traits: Any) -> Message:
        return fit([said("b", reasoning="a")], None, replace(ALL, **traits)).messages[0]

    assert message() == said("b", reasoning_content="a", reasoning="a")
    assert message(reasoning="thinking") == said("b", thinking="a")
    parts = [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}]
    assert message(reasoning="part") == said(parts)
    beside = fit(
        [said("b", reasoning="a", tool_calls=[call()])], None, replace(ALL, reasoning_beside_calls=False)
    )
    assert beside.messages[0]["content"] == "a\n\nb"
    assert fit([{**ASK, "reasoning": "a"}], None, ALL).messages == [ASK]


def test_tools_have_what_the_template_needs() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert fit([ASK], tools, ALL).variables == {"tools": tools}
    needs = replace(ALL, needs_description=True, needs_parameters=True, tools_variable="functions")
    filled = fit([ASK], tools, needs).variables["functions"][0]["function"]
    assert filled == {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    inner = {"type": "array", "items": {"type": "object", "properties": {"b": {}, "c": True}}}
    schema = {"type": "object", "properties": {"a": inner, "d": {"description": "d"}}}
    detailed = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    found = fit([ASK], detailed, replace(ALL, needs_details=True)).variables["tools"][0]["function"][
        "parameters"
    ]
    assert found["properties"]["d"] == {"description": "d"} and found["properties"]["a"]["description"] == ""
    assert found["properties"]["a"]["items"]["properties"] == {"b": {"description": ""}, "c": True}
    text = fit([ASK], tools, replace(ALL, tools_as_text=True)).variables["tools"]
    assert json.loads(text) == tools
    assert fit([ASK], None, replace(ALL, needs_tool_list=True)).variables == {"tools": []}
    none = fit([ASK], tools, replace(ALL, tools_variable=None))
    assert none.variables == {} and none.warnings == [
        "the chat template shows no tools: the model does not see them"
    ]
    assert tools == [{"type": "function", "function": {"name": "f"}}]


def test_variables_of_the_request_come_last() -> None:
    traits = replace(ALL, variables=(("date", "today"), ("time", "")), switches=("thinking",))
    assert fit([ASK], None, traits, {"date": "now", "enable_thinking": False}).variables == {
        "date": "now",
        "time": time.strftime(DATE),
        "enable_thinking": False,
        "thinking": False,
    }


MARKS = ReasoningMarks("<t>", "</t>")


def prompt(last: Message, opens: str = "", shows: bool = False, **traits: Any) -> tuple[str, bool]:
    """Continues a message by a template that writes roles and contents, and reasoning if it `shows` it."""

    def render(messages: Any, begins: bool) -> str:
        texts = [
            f"[{m['role']}]"
            + (f"<t>{m.get('reasoning_content', '')}</t>" if shows and m["role"] == "assistant" else "")
            + m["content"].strip()
            + "$"
            for m in messages
        ]
        return "".join(texts) + ("[assistant]" + opens if begins else "")

    found = continued([ASK, last], replace(ALL, **traits), render)
    return found.text, found.drops_reasoning


@pytest.mark.parametrize("content", ["be", "be ", "b$e\n"])
def test_prompts_end_where_the_message_ends(content: str) -> None:
    assert prompt(said(content)) == (f"[user]ask$[assistant]{content}", False)
    assert prompt(said([{"type": "text", "text": content}])) == (f"[user]ask$[assistant]{content}", False)
    shown = prompt(said(content, reasoning="ask "), shows=True)
    assert shown == (f"[user]ask$[assistant]<t>ask </t>{content}", False)
    assert prompt({"role": "user", "content": content}, shows=True)[0] == f"[user]ask$[user]{content}"


@pytest.mark.parametrize(
    ("opens", "begun"),
    [("", "<t>"), ("<t>", "<t>"), ("<t>\n", "<t>\n"), ("</t>", "<t>"), ("<t>\n\n</t>\n\n", "<t>")],
)
def test_reasoning_that_the_template_drops_is_written_by_its_marks(opens: str, begun: str) -> None:
    inside = prompt(said("", reasoning="hm"), opens, reasoning=None, marks=MARKS)
    assert inside == (f"[user]ask$[assistant]{begun}hm", False)
    end = "\n</t>\n\n" if begun.endswith("\n") else "</t>"
    whole = prompt(said("be", reasoning="hm"), opens, marks=MARKS)
    assert whole == (f"[user]ask$[assistant]{begun}hm{end}be", False)


def test_continuations_without_marks() -> None:
    assert prompt(said("be", reasoning="hm")) == ("[user]ask$[assistant]be", True)
    for last, message in (
        (said("", reasoning="hm"), "no place for reasoning"),
        (said(""), "no content to continue"),
        (said("a", tool_calls=[call()]), "calls tools"),
        (said([{"type": "image_url"}]), "other parts than texts"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt(last)
