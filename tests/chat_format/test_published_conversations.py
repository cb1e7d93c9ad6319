"""Conversations of seventeen kinds, rendered by published chat templates as transformers does, or better."""

from __future__ import annotations

import copy
import json
import re
from contextlib import suppress
from typing import Any

import pytest

from tests.support.chat_templates import (
    MISSING,
    cases,
    rendering,
    template_names,
    template_text,
    traits_of_file,
)
from torch_armllm.chat_format.continuation import continued
from torch_armllm.chat_format.conversation import fit
from torch_armllm.chat_format.template_traits import Message, TemplateTraits
from torch_armllm.engine.text.template_process import TemplateError

NAMES = template_names()
needs_templates = pytest.mark.skipif(not NAMES, reason=MISSING)

ASK: Message = {"role": "user", "content": "Weather?"}
AGAIN: Message = {"role": "user", "content": "And now?"}
TOOL = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
BARE = [{"type": "function", "function": {"name": "get_weather"}}]


def call(city: str = "Oslo", call_id: str = "call_oslo0001", arguments: str | None = None) -> dict[str, Any]:
    given = json.dumps({"city": city}) if arguments is None else arguments
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": given}}


def said(content: Any = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def result(content: Any = "Rain.", call_id: str = "call_oslo0001") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


BOTH = [call(), call("Rome", "call_rome0002")]
SUN = result("Sun.", "call_rome0002")
PARTS = [{"type": "text", "text": "Weather"}, {"type": "text", "text": "now?"}]

KINDS: dict[str, tuple[list[Message], Any, list[str]]] = {
    "plain": ([ASK], None, ["Weather?"]),
    "system": ([{"role": "system", "content": "Be brief."}, ASK], None, ["Be brief.", "Weather?"]),
    "developer": ([{"role": "developer", "content": "Be brief."}, ASK], None, ["Be brief.", "Weather?"]),
    "turns": ([ASK, said("Rain."), AGAIN], None, ["Weather?", "Rain.", "And now?"]),
    "call": ([ASK, said(None, tool_calls=[call()]), result()], TOOLS, ["Oslo", "Rain."]),
    "parallel": ([ASK, said(None, tool_calls=BOTH), result(), SUN], TOOLS, ["Oslo", "Rome", "Rain.", "Sun."]),
    "swapped": ([ASK, said(None, tool_calls=BOTH), SUN, result()], TOOLS, ["Oslo", "Rome", "Rain.", "Sun."]),
    "call with content": (
        [ASK, said("Let me see.", tool_calls=[call()]), result()],
        TOOLS,
        ["Oslo", "Rain."],  # many templates show either content or calls
    ),
    "reasoning": ([ASK, said("Rain.", reasoning="Clouds?"), AGAIN], None, ["Rain.", "And now?"]),
    "reasoning with a call": (
        [ASK, said("", reasoning="Clouds?", tool_calls=[call()]), result()],
        TOOLS,
        ["Oslo", "Rain."],
    ),
    "bare tools": ([ASK], BARE, ["Weather?"]),
    "damaged arguments": (
        [ASK, said("", tool_calls=[call(arguments='{"city": "Os')]), result()],
        TOOLS,
        ["city", "Os", "Rain."],
    ),
    "empty content": ([ASK, said("", tool_calls=[call()]), result()], TOOLS, ["Oslo", "Rain."]),
    "parts": ([{"role": "user", "content": PARTS}], None, ["Weather", "now?"]),
    "parts of a result": (
        [ASK, said("", tool_calls=[call()]), result([{"type": "text", "text": "Rain."}])],
        TOOLS,
        ["Oslo", "Rain."],
    ),
}
WRITTEN_BY_PYTHON = re.compile(r"None|'text': '|\"text\": \"|'type': 'text'")


def by_transformers(template: str, messages: list[Message], tools: Any) -> str | None:
    """Returns what transformers renders for a client that knows the model; None: it refuses."""
    given = copy.deepcopy(messages)
    for message in given:
        if "reasoning" in message:
            message["reasoning_content"] = message.pop("reasoning")
        for each in message.get("tool_calls", ()):
            with suppress(ValueError):
                each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    try:
        return rendering(template)(given, tools=tools, add_generation_prompt=True)
    except TemplateError:
        return None


def fitted(template: str, messages: list[Message], tools: Any, traits: TemplateTraits) -> str:
    conversation = fit(messages, tools, traits)
    return rendering(template)(conversation.messages, add_generation_prompt=True, **conversation.variables)


def why_better(kind: str, theirs: str | None, words: list[str], traits: TemplateTraits) -> str | None:
    """Returns why a text may differ from that of transformers; None: it may not."""
    if theirs is None:
        return "transformers refuses the conversation"
    if any(word not in theirs for word in words):
        return "transformers drops a part of the conversation"
    if WRITTEN_BY_PYTHON.search(theirs):
        return "transformers shows a content as Python or JSON writes it"
    if kind == "developer" and not traits.knows_developer:
        return "the template writes the name of any role, and the model knows that of the system"
    if kind == "swapped" and traits.positional_results:
        return "the model takes results for those of the calls at their places"
    if kind == "damaged arguments" and "Os\\" not in theirs.replace('\\"', '"'):
        return "transformers shows the arguments as a text within JSON, not as what the model wrote"
    if kind.startswith("reasoning") and "Clouds?" not in theirs:
        return "transformers drops reasoning that the template reads from another field"
    return None


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_conversations_are_rendered_as_transformers_does_or_better(name: str) -> None:
    template, traits = template_text(name), traits_of_file(name)
    for kind, (messages, tools, words) in KINDS.items():
        before = copy.deepcopy(messages)
        ours = fitted(template, messages, tools, traits)
        theirs = by_transformers(template, messages, tools)
        assert messages == before
        missing = [word for word in words if word not in ours]
        assert not missing, f"{kind}: {missing}"
        if ours != theirs:
            assert why_better(kind, theirs, words, traits), f"{kind}:\n{theirs}\n{ours}"


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_last_messages_are_continued_where_they_end(name: str) -> None:
    template, traits = template_text(name), traits_of_file(name)

    def prompt(message: Message) -> str:
        conversation = fit([ASK, message], None, traits, keep_last=True)
        render = rendering(template)
        return continued(
            conversation.messages,
            traits,
            lambda given, begins: render(given, add_generation_prompt=begins, **conversation.variables),
        ).text

    plain = prompt(said("The weather, "))
    assert plain.endswith("The weather, ")
    whole = fitted(template, [ASK, said("The weather, now")], None, traits)
    assert whole.startswith(plain)
    thought = prompt(said("The weather, ", reasoning="Clouds?"))
    assert thought.endswith("The weather, ")
    if traits.marks is not None or traits.reasoning is not None:
        opened = prompt(said(None, reasoning="Clouds?"))
        assert opened.endswith("Clouds?")
        assert thought.startswith(opened)
    else:
        assert thought == plain
        with pytest.raises(ValueError, match="no place for reasoning"):
            prompt(said("", reasoning="Clouds?"))


THOUGHT = "I'm thinking"
ENDS = {  # of prompts that continue the message of a case, by the beginnings of their templates' names
    "Qwen3.5": f"assistant\n<think>\n{THOUGHT}\n</think>\n\nHello, ",
    "mistralai-Ministral": f"[/INST][THINK]{THOUGHT}[/THINK]Hello, ",
    "google-gemma-2": "<start_of_turn>model\nHello, ",
    "google-gemma-4": f"<|turn>model\n<|channel>thought\n{THOUGHT}\n<channel|>Hello, ",
    "Qwen-QwQ": f"assistant\n<think>\n{THOUGHT}\n</think>\n\nHello, ",
    "NousResearch": "<|im_start|>assistant\nHello, ",
    "ibm-granite-granite-3.3": f"<|end_of_role|><think>{THOUGHT}</think>Hello, ",
    "ibm-granite-granite-4": "<|end_of_role|>Hello, ",
    "Qwen3-Coder": "<|im_start|>assistant\nHello, ",
    "deepseek-ai-DeepSeek-V": "<｜Assistant｜><think>I'm",
    "inclusionai-ling": f"<role>ASSISTANT</role>\n<think>{THOUGHT}",
    "Kimi-K2-Thinking": "assistant<|im_middle|><think>I'm",
    "moonshotai-Kimi-K2": "assistant<|im_middle|>Hello, ",
    "LFM2.5": "<|im_start|>assistant\n<think>I'm",
    "Reka-Edge": f"<sep>assistant: <think>\n{THOUGHT}\n</think>\n\nHello, ",
    "MiniMax-M2": f"]~b]ai\n<think>\n{THOUGHT}\n</think>\n\nHello, ",
    "MiniMax-M3": "]~b]ai\n<mm:think>I'm",
    "NVIDIA-Nemotron": f"Assistant\n<think>\n{THOUGHT}\n</think>\n\nHello, ",
    "CohereForAI": "<|CHATBOT_TOKEN|>Hello, ",
    "mistralai-Mistral-Nemo": "[/INST]Hello, ",
    "meetkai-functionary-medium-v3.1": "assistant<|end_header_id|>\n\nHello, ",
    "meetkai-functionary-medium-v3.2": "assistant<|end_header_id|>\n\n>>>all\nHello, ",
    "fireworks": "assistant<|end_header_id|>\n\nHello, ",
    "deepseek-ai-DeepSeek-R1-Distill-Llama": f"<｜Assistant｜><think>\n{THOUGHT}\n</think>\n\nHello, ",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen": "<｜Assistant｜><think>\nI'm",
    "llama-cpp-deepseek-r1": "<｜Assistant｜><think>\nI'm",
    "Qwen-Qwen2.5": "<|im_start|>assistant\nHello, ",
    "unsloth-Apriel": "<|assistant|>\nHello, ",
    "openai-gpt-oss": f"{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>Hello, ",
}


@needs_templates
def test_continued_cases() -> None:
    seen = 0
    for case in filter(lambda each: each["continue"], cases()):
        name = case["template"]
        template, traits = template_text(name), traits_of_file(name)
        messages = [
            {"role": each["role"], "content": each["content"], "reasoning": each["reasoning_content"]}
            for each in case["messages"]
        ]
        variables = {"enable_thinking": case["enable_thinking"]}
        conversation = fit(messages, None, traits, variables, keep_last=True)
        render = rendering(template)
        prompt = continued(
            conversation.messages,
            traits,
            lambda given, begins, render=render, more=conversation.variables: render(
                given, add_generation_prompt=begins, **more
            ),
        ).text
        end = next(ENDS[each] for each in sorted(ENDS, key=len, reverse=True) if name.startswith(each))
        if case["continue"] == "reasoning" and end.endswith("Hello, "):
            end = "<think>\nI'm"
        assert prompt.endswith(end), f"{name}: {prompt[-200:]!r}"
        seen += 1
    assert seen >= 30
