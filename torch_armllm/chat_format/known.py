"""Formats that a template's renderings do not show, chosen by what the template holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_armllm.chat_format.format import (
    ID,
    INDEX,
    ArgumentFormat,
    CallFormat,
    ChatFormat,
    JsonFormat,
    ReasoningFormat,
)
from torch_armllm.chat_format.probe import KEY, NAME, VALUE

_MINIMAX = "]<]minimax[>["
CODE_TAG = "<|python_tag|>"
BEFORE_JSON, BEHIND_JSON = (CODE_TAG, "```json", "```", "<tool_call>"), ("```", "<|eom_id|>", "</tool_call>")
"""Texts that models write before and behind a call that has no markers."""


def layout(name: str, arguments: str) -> str:
    """Returns a call of the probes in JSON, as a template would render it."""
    return f'{{"{name}": "{NAME}", "{arguments}": {{"{KEY}": "{VALUE}"}}}}'


MISTRAL_NAME_ENDS = ("", "[ARGS]", f"[CALL_ID]{ID}[ARGS]")
"""Texts between a name and its arguments: each generation of Mistral's models has another."""
_HERMES_LAYOUT = layout("name", "arguments")


def _listed(begin: str, end: str, **more: Any) -> CallFormat:
    """Returns the format of calls in one JSON list."""
    form = JsonFormat(is_list=True, layout=_HERMES_LAYOUT)
    return CallFormat("json", section_begin=begin, separator=", ", section_end=end, json=form, **more)


CALLS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        "json",
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
        json=JsonFormat(layout=_HERMES_LAYOUT),
    ),
    "kimi_k2": CallFormat(
        "tag_json",
        section_begin="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>functions.",
        name_end=f":{INDEX}<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        section_end="<|tool_calls_section_end|>",
        id_around_name=True,
        openers=("<|tool_call_section_begin|><|tool_call_begin|>functions.",),
        closers=("<|tool_call_section_end|>",),
    ),
    "lfm2": CallFormat(
        "python", section_begin="<|tool_call_start|>[", separator=", ", section_end="]<|tool_call_end|>"
    ),
    "pythonic": CallFormat(
        "python",
        section_begin="[",
        separator=", ",
        section_end="]",
        openers=("<|python_start|>[",),
        closers=("<|python_end|>",),
    ),
    "olmo3": CallFormat(
        "python", section_begin="<function_calls>\n", separator="\n", section_end="\n</function_calls>"
    ),
    "nemotron_v2": _listed("<TOOLCALL>[", "]</TOOLCALL>"),
    "phi4_mini": _listed(
        "functools[", "]", openers=("<|tool_call|>", "functools ["), closers=("<|/tool_call|>",)
    ),
    "tool_calls": _listed("<tool_calls>[", "]</tool_calls>"),
    "internlm": CallFormat(
        "json",
        begin="<|action_start|><|plugin|>\n",
        end="<|action_end|>",
        json=JsonFormat(arguments="parameters", layout=layout("name", "parameters")),
    ),
    "granite": _listed("<|tool_call|>[", "]"),
    "functionary_v3": CallFormat("tag_json", begin=">>>", name_end="\n", raw_argument=True),
    "gemma4": CallFormat(
        "braces", begin="<|tool_call>call:", end="<tool_call|>", closers=("<|tool_response>",), quote='<|"|>'
    ),
    "functiongemma": CallFormat(
        "braces",
        begin="<start_function_call>call:",
        end="<end_function_call>",
        closers=("<start_function_response>",),
        quote="<escape>",
    ),
    "minimax_m3": CallFormat(
        "nested",
        section_begin=f"{_MINIMAX}<tool_call>\n",
        begin=f'{_MINIMAX}<invoke name="',
        name_end='">',
        end=f"{_MINIMAX}</invoke>\n",
        section_end=f"{_MINIMAX}</tool_call>",
        argument=ArgumentFormat(f"{_MINIMAX}<", ">", f"{_MINIMAX}</"),
    ),
    "muse": CallFormat(
        "tagged",
        section_begin="<atem:function_calls>\n",
        begin='<atem:invoke name="',
        name_end='">\n',
        end="\n</atem:invoke>",
        separator="\n",
        section_end="\n</atem:function_calls>",
        argument=ArgumentFormat('<atem:parameter name="', '">', "</atem:parameter>", separator="\n"),
    ),
    "harmony": CallFormat("tag_json", begin=" to=functions.", name_end="<|message|>", parallel=False),
}
"""Calls by the name of their format."""

_BY_HAND = (
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|im_middle|>", "<|im_assistant|>"), "kimi_k2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [",), "lfm2"),
    (("<TOOLCALL>",), "nemotron_v2"),
    (("functools",), "phi4_mini"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini"),
    (("<function_calls>", "<functions>"), "olmo3"),
    (("<|tool_call|>",), "granite"),
    (("<|plugin|>",), "internlm"),
    (("<tool_calls>",), "tool_calls"),
    (("[func_name1(params_name1=params_value1",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    ((">>>all",), "functionary_v3"),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("<tool_call>", "<args-json-object>"), "hermes"),
)
"""Texts in templates that cannot render a call, and the formats of their models."""


_CONTENT_TAGS = (("<response>", "</response>"), ("<answer>", "</answer>"))
"""Tags around content that templates take away, or only mention."""


def known(template: str, derived: ChatFormat) -> ChatFormat:
    """Returns the format of a template: the derived one, or what is known where that cannot be right."""
    if "<|channel|>" in template and "<|message|>" in template and "analysis" in template:
        return replace(
            derived, source="harmony", reasoning=ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
            calls=CALLS["harmony"], content_begin="", content_end="", messages="harmony",
        )  # fmt: skip
    if "<atem:function_calls>" in template and "to=self" in template:
        return replace(
            derived, source="muse", reasoning=ReasoningFormat(" to=self<|message|>", "<|eom|>"),
            calls=CALLS["muse"], content_begin="", content_end="", messages="recipients",
        )  # fmt: skip
    if "<|tool_call>call:" in template:
        return replace(
            derived, source="gemma4",
            reasoning=ReasoningFormat("<|channel>thought", "<channel|>", repeats=True), calls=CALLS["gemma4"],
        )  # fmt: skip
    if "<start_function_call>call:" in template:
        return replace(derived, source="functiongemma", calls=CALLS["functiongemma"])
    if _MINIMAX in template or "]<]minimax" in template:
        return replace(derived, source="minimax_m3", calls=CALLS["minimax_m3"])
    if ">>>all" in template:
        return replace(
            derived,
            source="functionary_v3",
            calls=CALLS["functionary_v3"],
            content_begin=">>>all\n",
            begun=">>>",
        )
    calls = derived.calls
    if calls is not None:
        calls = _with_variants(calls, template)
        derived = replace(derived, calls=calls)
    if calls is not None and calls.kind == "json" and calls.is_bare:
        return replace(derived, calls=replace(calls, openers=BEFORE_JSON, closers=BEHIND_JSON))
    for begin, end in _CONTENT_TAGS:
        if end in template and derived.reasoning is not None and not derived.content_begin:
            derived = replace(derived, content_begin=begin, content_end=end)
    if "[END FINAL RESPONSE]" in template:
        derived = replace(derived, content_end="[END FINAL RESPONSE]")
    if calls is None:
        for holds, name in _BY_HAND:
            if all(each in template for each in holds):
                return replace(derived, source=name, calls=CALLS[name])
    return derived


def _with_variants(calls: CallFormat, template: str) -> CallFormat:
    """Adds the markers that models of a family mix up with those of the template."""
    if CODE_TAG in template:
        calls = replace(calls, takes_code=True)
    if "[TOOL_CALLS]" in calls.opening:
        return replace(calls, name_ends=(*calls.name_ends, *MISTRAL_NAME_ENDS))
    if "<|tool_calls_section_begin|>" in calls.opening:
        kimi = CALLS["kimi_k2"]
        return replace(calls, openers=kimi.openers, closers=kimi.closers)
    return calls
