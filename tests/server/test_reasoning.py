"""Reasoning is parted from answers, in pieces of any size and for all families."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support.server_live import NAME, Live, live, scripted
from tests.support.tiny_server import TEMPLATE, tokenizer
from torch_armllm.chat_format.format import ChatFormat, ReasoningFormat
from torch_armllm.chat_format.model_format import model_format
from torch_armllm.chat_format.parser import FormatParser
from torch_armllm.chat_format.prompt_part import begins_in
from torch_armllm.engine.sampling_params import FreeReasoning, StructuredOutputsParams
from torch_armllm.engine.structured.matcher import StructuredOutputs
from torch_armllm.engine.text.reasoning_tags import (
    PARSER_NAMES,
    REASONING_PARSERS,
    ReasoningTags,
    parser_of,
    reasoning_tags,
)
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.protocol.admin import LoadRequest
from torch_armllm.server.reasoning.token_count import reasoning_tokens

OPENING = TEMPLATE.replace(
    "<|assistant|>{%", "<|assistant|>{% if think is not defined %}<think>\n{% else %}{{ think }}{% endif %}{%"
)
CLOSED = "<think>\n\n</think>\n\n"
ASK: Any = [{"role": "user", "content": "why?"}]
THINK = REASONING_PARSERS["qwen3"]


def part(text: str, size: int, tags: ReasoningTags = THINK, opened: bool = False) -> tuple[str, str]:
    parser = FormatParser(format_of(tags), begins_in="reasoning" if opened else "")
    parts = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(parser.finish())
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


def format_of(tags: ReasoningTags) -> ChatFormat:
    return ChatFormat(reasoning=ReasoningFormat(tags.begin, tags.end, tags.implied))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("tags", REASONING_PARSERS.values(), ids=list(REASONING_PARSERS))
def test_parts(tags: ReasoningTags, size: int) -> None:
    begin, end = tags.begin, tags.end
    thought = f"a < b\n\nand {end[:-1]} c {begin}"
    assert part(f"\n{begin}\n{thought}\n{end}\n\nan {end} answer \n", size, tags) == (
        thought,
        f"an {end} answer \n",
    )
    assert part(f" {thought} {end}x", size, tags, opened=True) == (thought, "x")
    assert part(f"{begin} {thought} {end}x", size, tags, opened=True) == (f"{begin} {thought}", "x")
    assert part(f"{begin}cut {end[:-1]}", size, tags) == (f"cut {end[:-1]}", "")
    assert part(f"{begin}{end}x", size, tags) == ("", "x")
    for answer in ("", " \n", begin[:-1], f"an answer with {begin} and {end}", f" {begin[:3]}"):
        assert part(answer, size, tags) == ("", answer)
    assert part(begin[:3], size, tags, opened=True) == (begin[:3], "")


def test_families_are_found() -> None:
    def name(template: str, *tokens: str, given: str | None = None) -> str | None:
        found = reasoning_tags(given, template, set(tokens))
        return next((name for name, tags in REASONING_PARSERS.items() if tags is found), None)

    assert name("{% if '</think>' in content %}") == name("", "<think>", "</think>") == "qwen3"
    assert name("", "[THINK]", "[/THINK]") == "mistral"
    assert name("write 'Here is my response:' after") == "granite"
    assert name("", "<seed:think>", "</seed:think>") == "seed_oss"
    assert name("", "<think>") is None
    assert name("</think>", given="none") is None
    assert name("", given="deepseek_r1") == "deepseek_r1"


def test_names_of_vllm() -> None:
    names = ["kimi_k2", "minimax_m2", "granite", "openai_gptoss", "identity", "none", None]
    assert [parser_of(name) for name in names] == [
        *("qwen3", "deepseek_r1", "granite", None, "none", "none", None)
    ]
    for name in PARSER_NAMES:
        reasoning_tags(name, "", ())
        assert model_format(tokenizer(), OPENING, None, name).keeps_reasoning == (parser_of(name) == "none")
        assert LoadRequest(model="a", reasoning_parser=name).reasoning_parser == parser_of(name)
    for make in (
        lambda: parser_of("mine"),
        lambda: LoadRequest(model="a", reasoning_parser="mine"),
        lambda: model_format(tokenizer(), OPENING, None, "mine"),
    ):
        with pytest.raises(ValueError, match="'mine'; give qwen3, .*, glm45, .*, identity"):
            make()


def test_the_template_tells_what_openai_s_parser_is() -> None:
    """Messages with channels cannot be named apart from their template."""
    template = OPENING + "{# <|channel|>analysis<|message|> #}"
    named, found = (model_format(tokenizer(), template, name).format for name in ("openai", None))
    assert named == found and found.messages == "harmony"


def test_prompts_open_reasoning() -> None:
    def opens(tags: ReasoningTags, prompt: str, continued: str | None) -> bool:
        return begins_in(format_of(tags), prompt, continued) == "reasoning"

    assert opens(THINK, "<|assistant|><think>\n", None)
    assert not opens(THINK, "say <think>\n<|assistant|>", None)
    assert not opens(REASONING_PARSERS["deepseek_r1"], f"<|assistant|>{CLOSED}", None)
    assert opens(REASONING_PARSERS["deepseek_r1"], "<|assistant|>", None)
    assert opens(THINK, "", "<think> I")
    assert not opens(THINK, "<think> I</think> so", "<think> I</think> so")


def test_tokens_are_counted() -> None:
    own = tokenizer()

    def count(text: str, opened: bool = False) -> int:
        return reasoning_tokens(own(text)["input_ids"], THINK, opened, own)

    assert count("<think>é</think> yes") == len("<think></think>") + 2
    assert count("é</think> yes", opened=True) == len("</think>") + 2
    assert count("yes </think>") == 0
    assert count("<think>abc") == len("<think>abc")


@pytest.fixture(scope="module")
def thinking(tiny_llm: AsyncLLM) -> Iterator[Live]:
    with live(tiny_llm, model={"chat_template": OPENING}) as server:
        yield server


def create(server: Live, streamed: bool, **more: Any) -> dict[str, Any]:
    """Returns what a client reads: the message's parts, the finish reason and the usage."""
    client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=30)
    if not streamed:
        got = client.chat.completions.create(model=NAME, messages=ASK, **more)
        (choice,) = got.choices
        parts, reason, usage = [choice.message], choice.finish_reason, got.usage
    else:
        options: Any = {"include_usage": True}
        *chunks, end = client.chat.completions.create(
            model=NAME, messages=ASK, stream=True, stream_options=options, **more
        )
        parts = [chunk.choices[0].delta for chunk in chunks]
        reason, usage = chunks[-1].choices[0].finish_reason, end.usage
    thoughts = [getattr(each, "reasoning_content", None) for each in parts]
    assert thoughts == [getattr(each, "reasoning", None) for each in parts]
    first = next((i for i, each in enumerate(parts) if each.content or each.tool_calls), None)
    assert streamed is False or first is None or not any(thoughts[first:])
    calls: list[list[str]] = []
    for call in (call for each in parts for call in each.tool_calls or []):
        if call.function.name is not None:
            calls.append([call.function.name, ""])
        calls[-1][1] += call.function.arguments
    return {
        "reasoning": "".join(filter(None, thoughts)),
        "content": "".join(each.content or "" for each in parts),
        "calls": [(name, arguments) for name, arguments in calls],
        "reason": reason,
        "tokens": (
            usage.completion_tokens,
            getattr(usage.completion_tokens_details, "reasoning_tokens", None),
        ),
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_routes(thinking: Live, streamed: bool) -> None:
    text = "I see\n</think>\n\nyes"
    with scripted(thinking, text, 3) as asked:
        got = create(thinking, streamed)
        want = {"reasoning": "I see", "content": "yes", "calls": [], "reason": "stop"}
        assert got == {**want, "tokens": (len(text), len("I see\n</think>"))}
        assert asked[0][0]["prompt"].endswith("<|assistant|><think>\n")
        hidden = create(thinking, streamed, extra_body={"include_reasoning": False})
        assert hidden == {**got, "reasoning": ""}
        off = create(thinking, streamed, extra_body={"chat_template_kwargs": {"think": CLOSED}})
        assert off == {**got, "reasoning": "", "content": text, "tokens": (len(text), 0)}
    with scripted(thinking, f"<think>{text}"):
        on = create(thinking, streamed, extra_body={"chat_template_kwargs": {"think": ""}})
        assert on == {**got, "tokens": (len(text) + 7, len("<think>I see\n</think>"))}
    with scripted(thinking, "I se"):
        assert create(thinking, streamed) == {**got, "reasoning": "I se", "content": "", "tokens": (4, 4)}


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_come_after_reasoning(thinking: Live, streamed: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name in "fg"]
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    with scripted(thinking, f"a {call}?</think>\n{call}\n{call.replace('g', 'f')}"):
        got = create(thinking, streamed, tools=tools)
    assert (got["reasoning"], got["content"], got["reason"]) == (f"a {call}?", "", "tool_calls")
    assert got["calls"] == [("g", "{}"), ("f", "{}")]
    with scripted(thinking, f"a</think>\n\n{call}") as asked:
        got = create(thinking, streamed, tools=tools, tool_choice="required")
    assert (got["reasoning"], got["calls"]) == ("a", [("g", "{}")])
    assert asked[0][1].structured_outputs.reasoning == FreeReasoning(None, "</think>")


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_clients_own_accumulation(thinking: Live, size: int) -> None:
    """`stream` of the official client puts a message together from its deltas."""
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"
    ]
    call = '<tool_call>{"name": "%s", "arguments": {"a": %d}}</tool_call>'
    calls = [call % (name, i) for i, name in enumerate("gf")]
    client = OpenAI(base_url=f"{thinking.base}/v1", api_key="none", max_retries=0, timeout=30)
    asked: Any = {"model": NAME, "messages": ASK, "tools": tools, "parallel_tool_calls": True}
    with scripted(thinking, f"I see</think>\n\nyes\n{calls[0]}\n{calls[1]}", size):
        with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion()
        whole = client.chat.completions.create(**asked)
    assert kinds.count("tool_calls.function.arguments.done") == 2
    for completion in (streamed, whole):
        (choice,) = completion.choices
        message: Any = choice.message
        assert (message.reasoning_content, message.content) == ("I see", "yes")
        assert [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls] == [
            ("g", {"a": 0}),
            ("f", {"a": 1}),
        ]
        assert len({each.id for each in message.tool_calls}) == 2
        assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_that_is_cut_off_calls_nothing(thinking: Live, streamed: bool) -> None:
    function: Any = {"type": "function", "function": {"name": "f"}}
    with scripted(thinking, "I should"):
        got = create(thinking, streamed, tools=[function], tool_choice=function)
    assert (got["reasoning"], got["content"], got["calls"], got["reason"]) == ("I should", "", [], "stop")


def test_parser_can_be_turned_off(tiny_llm: AsyncLLM) -> None:
    off = {"chat_template": OPENING, "reasoning_parser": "none"}
    with live(tiny_llm, model=off) as server, scripted(server, "a</think>b"):
        got = create(server, False)
    assert (got["reasoning"], got["content"], got["tokens"]) == ("", "a</think>b", (10, None))


def test_templates_get_earlier_reasoning(tiny_llm: AsyncLLM) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}={{ m.reasoning }};{% endfor %}"
    with live(tiny_llm, model={"chat_template": template}) as server, scripted(server, "x") as asked:
        client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
        for name in ("reasoning", "reasoning_content"):
            before: Any = {"role": "assistant", "content": "b", name: "a"}
            client.chat.completions.create(model=NAME, messages=[*ASK, before])
        assert [prompt["prompt"] for prompt, _ in asked] == ["=;a=a;"] * 2


def test_effort_is_a_variable_of_templates(tiny_llm: AsyncLLM) -> None:
    template = "{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }}"
    with live(tiny_llm, model={"chat_template": template}) as server, scripted(server, "x") as asked:
        client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
        more: Any = {"chat_template_kwargs": {"enable_thinking": True}}
        client.chat.completions.create(model=NAME, messages=ASK, reasoning_effort="none", extra_body=more)
        client.chat.completions.create(model=NAME, messages=ASK, reasoning_effort="high")
        client.responses.create(model=NAME, input="a", reasoning={"effort": "none"})
    assert [prompt["prompt"] for prompt, _ in asked] == ["none,True,False", "high,,", "none,False,False"]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "kind", [{"json": {"const": 7}}, {"regex": "7"}, {"choice": ["7"]}, {"grammar": 'start: "7"'}]
)
def test_structure_begins_after_reasoning(kind: dict[str, Any], special: bool) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    own = tokenizer()
    if special:
        own.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    structured = StructuredOutputs(own, len(own), [own.eos_token_id])

    class Output:
        prompt_length = 0

        def __init__(self, text: str) -> None:
            self.token_ids = own(text)["input_ids"]

    def follows(text: str, following: str, begin: str | None) -> bool:
        """True if the following token may follow the text."""
        matcher = structured.matcher(
            StructuredOutputsParams(**kind, reasoning=FreeReasoning(begin, "</think>"))
        )
        (token,) = (
            own(following)["input_ids"] if len(following) == 1 else [own.convert_tokens_to_ids(following)]
        )
        output: Any = Output(text)
        return not bool(matcher.forbidden(output, [])[token])

    for begin, opening in (("<think>", "<think>"), (None, "")):
        assert follows(f"{opening}any {{ text", "!", begin)
        assert not follows(f"{opening}any text", "</s>", begin)
        for after in ("</think>", "</think>\n\n"):
            assert follows(f"{opening}any text 7{after}", "7", begin)
            assert not follows(f"{opening}any text 7{after}", "8", begin)
        assert follows(f"{opening}any</think>7", "</s>", begin)
        assert not follows(f"{opening}any</think>7", "!", begin)
    assert follows("", "7", "<think>") and not follows("", "8", "<think>")
    assert follows("7", "</s>", "<think>")
    assert not follows("7", "</s>", None)  # it is still reasoning


def test_structured_output_without_reasoning(thinking: Live) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    bias = {str(thinking.served.prompts.tokenizer("7")["input_ids"][0]): 100}
    more = {"structured_outputs": {"json": {"const": 7}}, "chat_template_kwargs": {"think": ""}}
    got = create(thinking, False, extra_body=more, logit_bias=bias, max_tokens=9)
    assert json.loads(got["content"]) == 7 and got["tokens"][1] == 0
