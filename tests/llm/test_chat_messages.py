"""Messages of `LLM.chat`: reasoning, content and calls of outputs, and prompts that show every message."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.stand_in import StubEngine, StubModel
from tests.support.tokenizers import byte_level
from torch_armllm.engine.outputs import ChatMessage, CompletionOutput, RequestOutput, ToolCall
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm import base
from torch_armllm.llm.llm import LLM

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name + ': ' + t.function.description }}]{% endfor %}"
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %};{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK: Any = [{"role": "user", "content": "the weather in Rome?"}]


class ScriptedEngine(StubEngine):
    """Writes one text for every request; keeps their parameters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.asked: list[SamplingParams] = []

    def step(self) -> list[RequestOutput]:
        outputs = []
        for name, (prompt, tokens, params) in self.requests.items():
            self.asked.append(params)
            text = self.text if params.detokenize else ""
            several = [CompletionOutput(index, text, [1], finish_reason="stop") for index in range(params.n)]
            outputs.append(RequestOutput(name, prompt, tokens, None, several, True))
        self.requests.clear()
        return outputs


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def make(text: str = "yes", template: str = TEMPLATE, **settings: Any) -> LLM:
        tokenizer = byte_level()
        tokenizer.chat_template = template
        loaded = ScriptedEngine(text), StubModel(), tokenizer
        monkeypatch.setattr(base, "load_engine", lambda *a, **k: loaded)
        return LLM("none", **settings)

    return make


def test_outputs_are_messages_which_the_conversation_goes_on_with(make: Callable[..., LLM]) -> None:
    text = f"<think>hm</think>I look.{CALL}"
    llm = make(text)
    two = [ASK, [{"role": "user", "content": "again?"}]]
    outputs = llm.chat(two, SamplingParams(n=2), use_tqdm=False, tools=[WEATHER])
    messages = [each.message for output in outputs for each in output.outputs]
    assert len(messages) == 4
    assert outputs[0].outputs[0].text == text
    for message in messages:
        assert message is not None
        (call,) = message.tool_calls
        assert (message.reasoning, message.content, call.name) == ("hm", "I look.", "weather")
        assert json.loads(call.arguments) == {"city": "Rome"}
    assert len({message.tool_calls[0].id for message in messages if message}) == 4
    assert messages[0] is not None
    said = messages[0].to_dict()
    result = {"role": "tool", "tool_call_id": messages[0].tool_calls[0].id, "content": "sunny"}
    (after,) = llm.chat([*ASK, said, result], use_tqdm=False, tools=[WEATHER])
    assert after.prompt == (
        "[weather: ]<|user|>the weather in Rome?;"
        f"<|assistant|><think>hm</think>I look.{CALL};<|tool|>sunny;<|assistant|>"
    )


def test_without_tools_calls_are_text(make: Callable[..., LLM]) -> None:
    (output,) = make(f"<think>hm</think>{CALL}").chat(ASK, use_tqdm=False)
    assert output.outputs[0].message == ChatMessage(CALL, "hm")
    (output,) = make("yes").chat(ASK, SamplingParams(detokenize=False), use_tqdm=False)
    assert output.outputs[0].message is None
    (generated,) = make("yes").generate("a", use_tqdm=False)
    assert generated.outputs[0].message is None
    kept = make("<think>hm</think>yes", reasoning_config={"reasoning_parser": "none"})
    assert kept.chat(ASK, use_tqdm=False)[0].outputs[0].message == ChatMessage("<think>hm</think>yes")


def test_special_tokens_are_kept_where_they_may_mark_calls(make: Callable[..., LLM]) -> None:
    llm = make()
    llm.chat(ASK, use_tqdm=False)
    llm.chat(ASK, SamplingParams(), use_tqdm=False, tools=[WEATHER])
    asked: Any = llm.llm_engine
    assert [each.skip_special_tokens for each in asked.asked] == [True, False]


def test_conversations_have_the_form_that_the_template_shows(
    make: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    llm = make()

    def prompt(messages: Any, **options: Any) -> str | None:
        return llm.chat(messages, use_tqdm=False, **options)[0].prompt

    developer = {"role": "developer", "content": "Be brief."}
    assert prompt([developer, *ASK]) == "<|system|>Be brief.;<|user|>the weather in Rome?;<|assistant|>"
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    said = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    want = f"<|user|>the weather in Rome?;<|assistant|><think>hm</think>{CALL};<|assistant|>"
    assert prompt([*ASK, said]) == want
    begun = [*ASK, {"role": "assistant", "content": "It is "}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(begun, **options) == "<|user|>the weather in Rome?;<|assistant|>It is "
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        prompt(ASK, tools=[WEATHER], tool_call_parser="hermes", chat_template="{{ messages[-1].content }}")
    assert "the chat template shows no tools: the model does not see them" in caplog.text


def test_python_functions_are_tools(make: Callable[..., LLM]) -> None:
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: where.
        """
        return city

    (output,) = make(CALL).chat(ASK, use_tqdm=False, tools=[weather])  # type: ignore[list-item]
    assert str(output.prompt).startswith("[weather: Tells the weather.]")
    message = output.outputs[0].message
    assert message is not None
    (call,) = message.tool_calls
    assert call == ToolCall(call.id, "weather", '{"city": "Rome"}')


def test_formats_that_are_not_known(make: Callable[..., LLM]) -> None:
    llm = make(CALL, "{{ messages[-1].content }}")
    assert llm.chat(ASK, use_tqdm=False)[0].outputs[0].message == ChatMessage(CALL)
    with pytest.raises(
        ValueError, match="renders no tool calls; leave out tools, or give tool_call_parser: "
    ):
        llm.chat(ASK, use_tqdm=False, tools=[WEATHER])
    (output,) = llm.chat(ASK, use_tqdm=False, tools=[WEATHER], tool_call_parser="hermes")
    assert output.outputs[0].message is not None and output.outputs[0].message.tool_calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_call_parser": "mine"}, "tool_call_parser is 'mine'; give hermes, ernie45, "),
        ({"tools": [{"name": "f"}]}, "tools[0] is no tool: give "),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs sets tokenize; give variables"),
        ({"continue_final_message": True}, "continue_final_message and add_generation_prompt exclude each"),
        ({"messages": [{"content": "a"}]}, 'a message is no {"role": …, "content": …}'),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "a tool call is no "),
        ({"messages": []}, "the conversation is empty"),
    ],
)
def test_wrong_arguments(make: Callable[..., LLM], options: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        make().chat(**{"messages": ASK, "use_tqdm": False, **options})
    assert str(refused.value).startswith(message)
