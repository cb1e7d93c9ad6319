"""The conversation of an agent: long instructions, tools, then turns of a call, its result and a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TEMPLATE = """\
{%- set asked = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set asked.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write a call as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role != 'system' or not tools or not loop.first -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and message.reasoning_content and loop.index0 > asked.last -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""A template for models without one that shows tools: reasoning is shown behind the user's last message."""

Message = dict[str, Any]
_AREAS = ("tests", "types", "errors", "files", "names", "docs", "commits", "searches", "builds", "reviews")
_DEEDS = ("read", "edit", "search", "list", "run", "move", "compare", "format", "measure", "summarize")


@dataclass(frozen=True)
class Request:
    """A request of the conversation.

    Attributes:
        turn: number of the turn, from 1.
        last: role of the last message, ``user`` or ``tool``.
        messages: in OpenAI's form.
    """

    turn: int
    last: str
    messages: list[Message]


def tools() -> list[dict[str, Any]]:
    """Returns the tools, in OpenAI's form."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"{deed}_files",
                "description": f"Use it to {deed} files of the project. The result is a text, a line each.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "description": f"the folder to {deed}, from the root"},
                        "pattern": {"type": "string", "description": "names that are taken, as *.py"},
                        "limit": {"type": "integer", "description": "most lines of the result"},
                        "recursive": {"type": "boolean", "description": "whether folders below are taken"},
                    },
                    "required": ["path"],
                },
            },
        }
        for deed in _DEEDS
    ]


def instructions(length: int, count: Callable[[str], int]) -> str:
    """Returns instructions.

    Args:
        length: their tokens, at least.
        count: returns the tokens of a text.
    """
    rules: list[str] = []
    while count("\n".join(rules)) < length:
        rules += [_rule(len(rules) + i) for i in range(16)]
    low, high = 0, len(rules)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if count("\n".join(rules[:middle])) < length else (low, middle)
    return "\n".join(rules[:low])


def _rule(number: int) -> str:
    area, deed = _AREAS[number % len(_AREAS)], _DEEDS[number // 3 % len(_DEEDS)]
    return (
        f"Rule {number}: before you {deed} anything that concerns {area}, look at section {number * 7 % 97} "
        f"of the guide, and keep to {number * 13 % 61} lines unless the user asks for more."
    )


def requests(prompt: str, turns: int, reasoning: bool = True) -> Iterator[Request]:
    """Yields two requests of each turn: one after the user's message, one after the result of the call.

    Args:
        prompt: the instructions.
        turns: number of turns.
        reasoning: True if the assistant reasons before each call and before each answer.
    """
    messages: list[Message] = [{"role": "system", "content": prompt}]
    for turn in range(1, turns + 1):
        area, deed = _AREAS[turn % len(_AREAS)], _DEEDS[turn * 3 % len(_DEEDS)]
        asked = f"Now {deed} what concerns {area} in part {turn}, and tell me what you would change first."
        messages.append({"role": "user", "content": asked})
        yield Request(turn, "user", list(messages))
        called = f"call{turn:05d}"
        arguments = (
            f'{{"path": "src/part_{turn}/{area}", "pattern": "*_{area}_{turn * 17 % 23}.py", '
            f'"limit": {20 + turn}, "recursive": {"true" if turn % 2 else "false"}}}'
        )
        function = {"name": f"{deed}_files", "arguments": arguments}
        call = {"id": called, "type": "function", "function": function}
        thought = f"The user wants {area} of part {turn}. Rule {turn * 5} says how; a call shows the files. "
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [call]}
            | ({"reasoning_content": thought * 3} if reasoning else {})
        )
        result = "\n".join(
            f"src/part_{turn}/{area}/{_AREAS[line % 10]}_{line * turn % 89}.py: {line * 31 % 977} lines"
            for line in range(12)
        )
        messages.append({"role": "tool", "tool_call_id": called, "content": result})
        yield Request(turn, "tool", list(messages))
        answer = f"In part {turn} I would first change the {turn % 12}th file: it holds most of {area}."
        messages.append(
            {"role": "assistant", "content": answer}
            | ({"reasoning_content": f"The longest file of {area} comes first."} if reasoning else {})
        )
