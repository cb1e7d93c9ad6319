"""Traits of chat templates that are found by rendering them."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from tests.support.chat_templates import rendering
from torch_armllm.chat_format import trait_probe
from torch_armllm.chat_format.continuation import continued
from torch_armllm.chat_format.conversation import fit
from torch_armllm.chat_format.template_switches import template_switches, thinking_variables, with_aliases
from torch_armllm.chat_format.template_traits import ReasoningMarks, TemplateTraits
from torch_armllm.chat_format.trait_probe import find_traits, traits_of
from torch_armllm.engine.text.template_process import TemplateBoundError, TemplateError

MUTATED = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception(1) }}"
    "{% endif %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content | trim }}</think>"
    "{% endif %}{{ m.content + '' }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def traits(template: str) -> TemplateTraits:
    return find_traits(template, rendering(template))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ANY, {"shows_system": True, "knows_developer": False, "tools_variable": None, "shows_calls": False}),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}",
            {"knows_developer": True},
        ),
        (  # the substring alone says nothing
            "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}",
            {"knows_developer": False},
        ),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            {"shows_system": False, "shows_systems": False, "shows_late_system": False},
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            {"shows_system": False},
        ),
        (
            "{% for m in messages %}{% if loop.previtem and loop.previtem.role == m.role %}"
            "{{ raise_exception('alternate') }}{% endif %}{{ m.content }}{% endfor %}",
            {"repeats": frozenset()},
        ),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
            {"part_roles": frozenset(("user", "assistant", "system", "tool")), "text_roles": frozenset()},
        ),
        ("{{ functions | map(attribute='function') | list }}" + ANY, {"tools_variable": "functions"}),
        ("{{ 'Tools: ' + functions }}" + ANY, {"tools_variable": "functions", "tools_as_text": True}),
        (
            "{% for t in tools or [] %}{{ t.function.name + t.function.description }}{% endfor %}" + ANY,
            {"needs_description": True, "needs_parameters": False},
        ),
        ("{% for t in tools %}{{ t }}{% endfor %}" + ANY, {"needs_tool_list": True}),
    ],
)
def test_traits(template: str, expected: dict[str, Any]) -> None:
    found = traits(template)
    assert {name: getattr(found, name) for name in expected} == expected


CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[CALL]{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{{ c.function.name }}{{ c.function.arguments | tojson }}",
            {"arguments": "object", "raw_arguments": False, "positional_results": True, "short_ids": False},
        ),
        ("{{ c.function.name + c.function.arguments }}", {"arguments": "text", "raw_arguments": True}),
        ("{{ c.function.name }}{{ c.function.arguments }}", {"arguments": "text"}),
        (
            "{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
            "{{ c.function.arguments | tojson }}",
            {"short_ids": True},
        ),
        (
            "{% for m in messages %}{{ m.tool_call_id }}{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
            {"positional_results": False, "empty_contents": ("",)},
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
            "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}",
            {"several_calls": False},
        ),
    ],
)
def test_traits_of_calls(template: str, expected: dict[str, Any]) -> None:
    found = traits(template if "messages" in template else CALLS.replace("CALL", template))
    assert found.shows_calls
    assert {name: getattr(found, name) for name in expected} == expected


def test_reasoning_is_found_by_its_field() -> None:
    def written(field: str) -> TemplateTraits:
        return traits("{% for m in messages %}<t>{{ m." + field + " }}</t>\n{{ m.content }}{% endfor %}")

    marks = ReasoningMarks("<t>", "</t>\n")
    assert (written("reasoning_content").reasoning, written("reasoning_content").marks) == (
        "reasoning_content",
        marks,
    )
    assert written("reasoning").reasoning == "reasoning_content"  # which carries both names
    assert written("nothing").reasoning is None
    parts = traits(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}[T]{{ p.thinking }}[/T]{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    assert (parts.reasoning, parts.marks) == ("part", ReasoningMarks("[T]", "[/T]"))


def test_switches_are_the_variables_of_a_request() -> None:
    template = (
        "{% if not enable_thinking is defined %}{% set enable_thinking = true %}{% endif %}{% set own = 1 %}"
        "{% if effort | default('low') and clear_thinking %}{{ bos_token }}{{ own }}{{ messages }}{% endif %}"
    )
    assert template_switches(template) == ("clear_thinking", "effort", "enable_thinking")
    assert thinking_variables(template_switches(template)) == {
        "clear_thinking": False,
        "enable_thinking": True,
    }
    assert template_switches("{% broken") == ()
    assert with_aliases({"enable_thinking": False}, ("thinking",)) == {
        "enable_thinking": False,
        "thinking": False,
    }
    given = {"enable_thinking": True, "thinking": False}
    assert with_aliases(given, ("thinking", "enable_thinking")) == given


def test_templates_that_show_nothing_have_the_default_traits() -> None:
    assert traits("{{ raise_exception('never') }}") == TemplateTraits()


def test_traits_of_templates_that_exceed_a_bound_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def render(**request: Any) -> str:
        asked.append(request)
        raise TemplateBoundError("the chat template did not render within 5 s")

    monkeypatch.setattr(trait_probe.SHARED, "render", render)
    for _ in range(2):
        with pytest.raises(TemplateBoundError, match="within 5 s"):
            traits_of("{{ messages }} once", ())
    assert len(asked) == 2


@pytest.mark.parametrize("seed", range(40))
def test_mutated_templates_only_refuse(seed: int) -> None:
    random = Random(seed)
    template = MUTATED
    for _ in range(random.randint(1, 3)):
        begin = random.randrange(len(template))
        end = begin + random.randint(1, 12)
        template = template[:begin] + template[begin:end] * random.choice((0, 2)) + template[end:]
    found = traits(template)
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "", "reasoning": "c"},
    ]
    conversation = fit(messages, None, found, keep_last=True)
    render = rendering(template)
    with suppress(ValueError, TemplateError):
        continued(
            conversation.messages,
            found,
            lambda given, begins: render(given, add_generation_prompt=begins, **conversation.variables),
        )


def test_the_process_of_templates_finds_the_same_once() -> None:
    tokens = (("bos_token", "<s>"),)
    assert traits_of(ANY, tokens) == traits(ANY)
    assert traits_of(ANY, tokens) is traits_of(ANY, tokens)
