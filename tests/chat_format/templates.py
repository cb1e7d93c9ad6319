"""Small chat templates, each with a syntax of calls of its own, and what a model writes with it."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """A template, and an output that reasons ``hm``, says ``Hi`` and calls f and g."""

    template: str
    output: str


def chat(turn: str, begin: str = "", thinks: bool = False) -> str:
    """Returns a template whose messages of the assistant are written by ``turn``."""
    return (
        "{%- for m in messages %}{%- if m.role == 'user' %}<|user|>{{ m.content }}<|end|>"
        "{%- elif m.role == 'assistant' %}<|assistant|>"
        + (
            "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{%- endif %}"
            if thinks
            else ""
        )
        + turn
        + "<|end|>{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>"
        + begin
        + "{%- endif %}"
    )


def calls(one: str, between: str = "", section: tuple[str, str] = ("", "")) -> str:
    """Returns the part of a template that writes content and calls."""
    return (
        (
            "{{ m.content or '' }}{%- if m.tool_calls %}{{ begin }}{%- for c in m.tool_calls %}"
            "{%- set f = c.function %}"
            + one
            + "{%- if not loop.last %}{{ between }}{%- endif %}{%- endfor %}{{ end }}{%- endif %}"
        )
        .replace("{{ begin }}", text(section[0]))
        .replace("{{ end }}", text(section[1]))
        .replace("{{ between }}", text(between))
    )


def text(value: str) -> str:
    """Returns an expression of a template that writes a text, its white space included."""
    return "{{ " + repr(value) + " }}"


_XML = (
    text("<seed:tool_call>\n<function=")
    + "{{ f.name }}"
    + text(">\n")
    + "{%- for k, v in f.arguments.items() %}"
    + text("<parameter=")
    + "{{ k }}"
    + text(">")
    + "{{ v if v is string else v | tojson }}"
    + text("</parameter>\n")
    + "{%- endfor %}"
    + text("</function>\n</seed:tool_call>")
)
_ATTRIBUTES = (
    text('<call tool="')
    + "{{ f.name }}"
    + text('">')
    + "{%- for k, v in f.arguments.items() %}"
    + text('<arg name="')
    + "{{ k }}"
    + text('" kind="')
    + "{{ 'text' if v is string else 'data' }}"
    + text('">')
    + "{{ v if v is string else v | tojson }}"
    + text("</arg>")
    + "{%- endfor %}"
    + text("</call>")
)
_PYTHON = (
    "{{ f.name }}({%- for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{%- if not loop.last %}{{ ', ' }}{%- endif %}{%- endfor %})"
)

SAMPLES = {
    "wrapped": Sample(
        chat(
            calls(
                text("<tool>")
                + '{{ {"type": "function", "function": {"name": f.name, "arguments": f.arguments}} '
                + "| tojson }}"
                + text("</tool>")
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi<tool>{"type": "function", "function": '
        '{"name": "f", "arguments": {"a": "x"}}}</tool>'
        '<tool>{"type": "function", "function": {"name": "g", "arguments": {"n": 7}}}</tool>',
    ),
    "name is the key": Sample(
        chat(calls("{{ {f.name: f.arguments} | tojson }}", ", ", ("[CALLS][", "]")), thinks=True),
        '<think>hm</think>Hi[CALLS][{"f": {"a": "x"}}, {"g": {"n": 7}}]',
    ),
    "ids and a list": Sample(
        chat(
            calls(
                '{{ {"id": c.id, "name": f.name, "parameters": f.arguments} | tojson }}',
                ",\n",
                ("<|ACTION|>[\n", "\n]<|END_ACTION|>"),
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi<|ACTION|>[\n{"id": "abc000007", "name": "f", "parameters": {"a": "x"}},\n'
        '{"id": "abc000008", "name": "g", "parameters": {"n": 7}}\n]<|END_ACTION|>',
    ),
    "xml": Sample(
        chat(calls(_XML, "\n"), thinks=True),
        "<think>hm</think>Hi<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=g>\n<parameter=n>7</parameter>\n</function>\n"
        "</seed:tool_call>",
    ),
    "attributes": Sample(
        chat(calls(_ATTRIBUTES, "", ("<calls>", "</calls>")), "<think>", thinks=True),
        'hm</think>Hi<calls><call tool="f"><arg name="a" kind="text">x</arg></call>'
        '<call tool="g"><arg name="n" kind="data">7</arg></call></calls>',
    ),
    "python": Sample(
        chat(calls(_PYTHON, "\n", ("<function_calls>\n", "\n</function_calls>")), thinks=True),
        '<think>hm</think>Hi<function_calls>\nf(a="x")\ng(n=7)\n</function_calls>',
    ),
    "text of arguments": Sample(
        chat(
            calls(
                text("<|call|>")
                + "{{ f.name }}"
                + text("<|args|>")
                + "{{ f.arguments + '' }}"
                + text("<|done|>")
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi<|call|>f<|args|>{"a": "x"}<|done|><|call|>g<|args|>{"n": 7}<|done|>',
    ),
    "calls without content": Sample(
        chat(
            "{%- if m.content is none %}"
            + calls("<tool_call>{{ f | tojson }}</tool_call>")
            + "{%- else %}{{ m.content }}{%- endif %}",
            thinks=True,
        ),
        '<think>hm</think>Hi<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {"n": 7}}</tool_call>',
    ),
    "index": Sample(
        chat(
            calls(
                text("<|call|>fn.")
                + "{{ f.name }}:{{ loop.index0 }}"
                + text("<|args|>")
                + "{{ f.arguments | tojson }}"
                + text("<|end_call|>"),
                "",
                ("<|calls|>", "<|end_calls|>"),
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi<|calls|><|call|>fn.f:0<|args|>{"a": "x"}<|end_call|>'
        '<|call|>fn.g:1<|args|>{"n": 7}<|end_call|><|end_calls|>',
    ),
    "ids in attributes": Sample(
        chat(
            calls(
                text('<call id="')
                + "{{ c.id }}"
                + text('" n="')
                + "{{ loop.index0 }}"
                + text('">')
                + '{{ {"name": f.name, "arguments": f.arguments} | tojson }}'
                + text("</call>")
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi<call id="abc000007" n="0">{"name": "f", "arguments": {"a": "x"}}</call>'
        '<call id="abc000008" n="1">{"name": "g", "arguments": {"n": 7}}</call>',
    ),
    "keys are tags": Sample(
        chat(
            calls(
                text('<invoke tool="')
                + "{{ f.name }}"
                + text('">')
                + "{%- for k, v in f.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{%- endfor %}</invoke>"
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi<invoke tool="f"><a>x</a></invoke><invoke tool="g"><n>7</n></invoke>',
    ),
    "a fence": Sample(
        chat(
            calls(
                text("```tool\n") + '{{ {"tool": f.name, "input": f.arguments} | tojson }}' + text("\n```"),
                "\n",
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi```tool\n{"tool": "f", "input": {"a": "x"}}\n```\n'
        '```tool\n{"tool": "g", "input": {"n": 7}}\n```',
    ),
    "tags with numbers": Sample(
        chat(
            calls(
                '{{ {"name": f.name, "arguments": f.arguments} | tojson }}',
                ", ",
                ("[token11][", "][token12]"),
            ),
            thinks=True,
        ),
        '<think>hm</think>Hi[token11][{"name": "f", "arguments": {"a": "x"}}, '
        '{"name": "g", "arguments": {"n": 7}}][token12]',
    ),
    "a name on a line": Sample(
        chat(calls("{{ f.name + '\\n' }}{{ f.arguments | tojson }}", "<|end|><|assistant|>"), thinks=True),
        '<think>hm</think>Hi\nf\n{"a": "x"}<|end|><|assistant|>g\n{"n": 7}',
    ),
    "bare": Sample(
        chat(calls('{{ {"name": f.name, "parameters": f.arguments} | tojson }}', "; "), thinks=True),
        '<think>hm</think>Hi\n{"name": "f", "parameters": {"a": "x"}}; {"name": "g", "parameters": {"n": 7}}',
    ),
}

LOOSE = {
    "a list alone": Sample(
        chat(
            calls('{{ {"name": f.name, "arguments": f.arguments} | tojson }}', ", ", ("[", "]")), thinks=True
        ),
        '<think>hm</think>Hi\n```json\n[{"name": "f", "arguments": {"a": "x"}}, '
        '{"name": "g", "arguments": {"n": 7}}]\n```',
    ),
    "recipients": Sample(
        chat(
            "{%- if m.content %}"
            + text("<|to|>all\n<|text|>")
            + "{{ m.content }}{%- endif %}"
            + calls(
                text("<|to|>") + "{{ f.name }}" + text("\n<|text|>") + "{{ f.arguments | tojson }}",
                "\n<|from|>assistant\n",
            ).removeprefix("{{ m.content or '' }}"),
            thinks=True,
        ),
        '<think>hm</think><|to|>all\n<|text|>Hi\n<|from|>assistant\n<|to|>f\n<|text|>{"a": "x"}'
        '\n<|from|>assistant\n<|to|>g\n<|text|>{"n": 7}',
    ),
    "mentioned": Sample(
        chat(
            "{%- set said = (m.content or '').split('</answer>')[0] %}{%- if said %}{{ said }}{%- endif %}"
            + calls("<tool_call>{{ f | tojson }}</tool_call>").removeprefix("{{ m.content or '' }}"),
            "{%- if tools is undefined %}<deep:think></deep:think>{%- endif %}",
        ),
        "<deep:think>hm</deep:think>\n<answer>\nHi\n"
        '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {"n": 7}}</tool_call>\n</answer>',
    ),
}
"""Outputs that have more around calls than their markers."""
