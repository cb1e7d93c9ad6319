"""Prompts that end within a message of the assistant, which the model goes on writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_armllm.chat_format.message_parts import is_text, text_of
from torch_armllm.chat_format.template_traits import Message, ReasoningMarks, TemplateTraits, with_reasoning

_END = "vqcontinueshere"
"""Stands where the model goes on: a word, which templates neither trim nor escape."""
_THOUGHT = "vqthoughthere"
"""Stands at the end of the message's reasoning, to see whether the template shows it."""

RenderMessages = Callable[[Sequence[Message], bool], str]
"""Renders messages; true to begin a message of the assistant behind them."""


@dataclass(frozen=True)
class Continuation:
    """A prompt that ends within a message.

    Attributes:
        text: the prompt.
        drops_reasoning: True if the message's reasoning is not in it, since the template knows none.
    """

    text: str
    drops_reasoning: bool = False


def continued(messages: Sequence[Message], traits: TemplateTraits, render: RenderMessages) -> Continuation:
    """Returns the prompt that ends where the last message ends.

    That is behind its content; behind its reasoning, which stays open, where it has nothing else. A template
    that leaves the reasoning of a message out gets it by the marks that the model writes.

    Args:
        messages: of a conversation, in the template's form but for the last, whose reasoning is in its field
            ``reasoning``.
        traits: of the template.
        render: renders messages.

    Raises:
        ValueError: the last message has no text, calls tools, or ends within reasoning that the template
            has no place for.
    """
    *before, last = messages
    content, reasoning = last.get("content") or "", last.get("reasoning") or ""
    last = {name: value for name, value in last.items() if name != "reasoning"}
    if last.get("tool_calls"):
        raise ValueError("continue_final_message cannot continue a message that calls tools")
    if not is_text(content):
        raise ValueError("continue_final_message cannot continue a message with other parts than texts")
    text = text_of(content)
    if not text and not reasoning:
        raise ValueError("continue_final_message: the last message has no content to continue")
    if last["role"] != "assistant":
        reasoning = ""
    if not text:
        return Continuation(_within_reasoning(before, last, reasoning, traits, render))
    if not reasoning:
        return Continuation(_cut(render([*before, _said(last, text + _END, traits)], False)))
    trimmed = reasoning.rstrip()
    marked = trimmed + _THOUGHT + reasoning[len(trimmed) :]
    said = with_reasoning(_said(last, text + _END, traits), marked, traits.reasoning)
    shown = _cut(render([*before, said], False))
    if _THOUGHT in shown:
        return Continuation(shown.replace(_THOUGHT, ""))
    if traits.marks is None:
        return Continuation(shown, drops_reasoning=True)
    begun = _opened(render(before, True), traits.marks)
    return Continuation(begun + reasoning + _closing(begun, traits.marks) + text)


def _within_reasoning(
    before: list[Message], last: Message, reasoning: str, traits: TemplateTraits, render: RenderMessages
) -> str:
    if traits.reasoning is not None:
        empty = _said(last, "", traits)
        shown = render([*before, with_reasoning(empty, reasoning + _END, traits.reasoning)], False)
        if _END in shown:
            return _cut(shown)
    if traits.marks is None:
        raise ValueError(
            "continue_final_message: the last message ends within its reasoning, and the chat template has "
            "no place for reasoning; give its content, too, or a chat_template that reads reasoning"
        )
    return _opened(render(before, True), traits.marks) + reasoning


def _said(last: Message, text: str, traits: TemplateTraits) -> Message:
    role = last["role"]
    as_parts = role not in traits.text_roles and role in traits.part_roles
    return {**last, "content": [{"type": "text", "text": text}] if as_parts else text}


def _cut(shown: str) -> str:
    """Returns what was rendered before the end of the message.

    Raises:
        ValueError: the template does not show it.
    """
    at = shown.rfind(_END)
    if at < 0:
        raise ValueError("continue_final_message: the chat template does not show the last message")
    return shown[:at]


def _opened(prompt: str, marks: ReasoningMarks) -> str:
    """Returns a prompt that begins a message as one that begins its reasoning."""
    begin, end = marks.begin.strip(), marks.end.strip()
    if (closed := prompt.rstrip()).endswith(end):  # the template has turned reasoning off
        prompt = closed.removesuffix(end)
        if prompt.rstrip().endswith(begin):
            prompt = prompt.rstrip().removesuffix(begin)
    return prompt if prompt.rstrip().endswith(begin) else prompt + marks.begin


def _closing(begun: str, marks: ReasoningMarks) -> str:
    """Returns what ends the reasoning: on a line of its own where the reasoning begins on one."""
    is_bare = marks.end == marks.end.strip()
    return f"\n{marks.end}\n\n" if is_bare and begun.endswith("\n") else marks.end
