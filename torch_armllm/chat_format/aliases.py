"""Formats of tool calls by the names of vLLM's tool parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch_armllm.chat_format.format import TYPE, ArgumentFormat, CallFormat, JsonFormat
from torch_armllm.chat_format.known import BEFORE_JSON, BEHIND_JSON, CALLS, MISTRAL_NAME_ENDS, layout

_GLM = ArgumentFormat("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", separator="\n")
_QWEN = ArgumentFormat("<parameter=", ">", "</parameter>", before="\n", after="\n", separator="\n")
_MINIMAX = ArgumentFormat('<parameter name="', '">', "</parameter>", separator="\n")
_DSML = ArgumentFormat(
    '<｜DSML｜parameter name="',
    f'" string="{TYPE}">',
    "</｜DSML｜parameter>",
    string_type="true",
    other_type="false",
    separator="\n",
)
_QWEN3_CODER = CallFormat(
    "tagged",
    begin="<tool_call>\n<function=",
    name_end=">\n",
    end="\n</function>\n</tool_call>",
    separator="\n",
    argument=_QWEN,
)
_GLM45 = CallFormat(
    "tagged", begin="<tool_call>", name_end="\n", end="\n</tool_call>", separator="\n", argument=_GLM
)
_LLAMA = CallFormat(
    "json",
    json=JsonFormat(arguments="parameters", layout=layout("name", "parameters")),
    parallel=False,
    openers=BEFORE_JSON,
    closers=BEHIND_JSON,
    takes_code=True,
)


def _deepseek(kind: str, name_end: str, end: str, separator: str) -> CallFormat:
    return CallFormat(
        "tag_json",
        section_begin="<｜tool▁calls▁begin｜>",
        begin=f"<｜tool▁call▁begin｜>{kind}",
        name_end=name_end,
        end=f"{end}<｜tool▁call▁end｜>",
        separator=separator,
        section_end="<｜tool▁calls▁end｜>",
    )


def _dsml(section: str) -> CallFormat:
    return CallFormat(
        "tagged",
        section_begin=f"\n\n<｜DSML｜{section}>\n",
        begin='<｜DSML｜invoke name="',
        name_end='">\n',
        end="\n</｜DSML｜invoke>",
        separator="\n",
        section_end=f"\n</｜DSML｜{section}>",
        argument=_DSML,
    )


_XLAM = CallFormat(
    "json",
    section_begin="[",
    separator=", ",
    section_end="]",
    json=JsonFormat(is_list=True, layout=layout("name", "arguments")),
    openers=(*BEFORE_JSON, "[TOOL_CALLS]"),
    closers=BEHIND_JSON,
)
_STEP3 = CallFormat(
    "tagged",
    section_begin="<｜tool_calls_begin｜>",
    begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    name_end='">',
    end="</steptml:invoke><｜tool_call_end｜>",
    section_end="<｜tool_calls_end｜>",
    argument=ArgumentFormat('<steptml:parameter name="', '">', "</steptml:parameter>"),
)
_COHERE = CallFormat(
    "json",
    section_begin="<|START_ACTION|>[",
    separator=", ",
    section_end="]<|END_ACTION|>",
    json=JsonFormat(
        "tool_name", "parameters", "tool_call_id", is_list=True, layout=layout("tool_name", "parameters")
    ),
)


def _hermes(begin: str, end: str) -> CallFormat:
    return replace(CALLS["hermes"], begin=begin, end=end)


TOOL_PARSERS: Mapping[str, CallFormat | None] = {
    "hermes": CALLS["hermes"],
    "ernie45": CALLS["hermes"],
    "granite4": CALLS["hermes"],
    "granite-20b-fc": _hermes("<function_call> ", ""),
    "longcat": _hermes("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "gigachat3": replace(
        _hermes("function call<|role_sep|>\n", "<|message_sep|>\n\n"),
        openers=("<|message_sep|>function call<|role_sep|>", "<|function_call|>", "function call"),
    ),
    "minimax": replace(
        _hermes("", ""), section_begin="<tool_calls>\n", section_end="\n</tool_calls>", separator="\n"
    ),
    "xlam": _XLAM,
    "step3": _STEP3,
    "cohere_command3": _COHERE,
    "functiongemma": CALLS["functiongemma"],
    "openai": None,
    "mistral": CallFormat("tag_json", begin="[TOOL_CALLS]", name_end="[ARGS]", name_ends=MISTRAL_NAME_ENDS),
    "llama": _LLAMA,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": CALLS["pythonic"],
    "llama4_pythonic": CALLS["pythonic"],
    "olmo3": CALLS["olmo3"],
    "lfm2": CALLS["lfm2"],
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "step3p5": _QWEN3_CODER,
    "seed_oss": CallFormat(
        "tagged",
        begin="<seed:tool_call>\n<function=",
        name_end=">\n",
        end="\n</function>\n</seed:tool_call>",
        separator="\n",
        argument=ArgumentFormat("<parameter=", ">", "</parameter>", separator="\n"),
    ),
    "glm45": _GLM45,
    "glm47": _GLM45,
    "minimax_m2": CallFormat(
        "tagged",
        section_begin="<minimax:tool_call>\n",
        begin='<invoke name="',
        name_end='">\n',
        end="\n</invoke>",
        separator="\n",
        section_end="\n</minimax:tool_call>",
        argument=_MINIMAX,
    ),
    "minimax_m3": CALLS["minimax_m3"],
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("", "<｜tool▁sep｜>", "", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": CALLS["kimi_k2"],
    "gemma4": CALLS["gemma4"],
    "granite": CALLS["granite"],
    "hunyuan_a13b": CALLS["tool_calls"],
    "internlm": CALLS["internlm"],
    "jamba": CALLS["tool_calls"],
    "phi4_mini_json": CALLS["phi4_mini"],
    "nemotron_v2": CALLS["nemotron_v2"],
}
"""Calls by the names that ``--tool-call-parser`` takes; None: the chat template tells."""
