"""The part of a message that an output begins within: what the prompt has begun."""

from __future__ import annotations

from torch_armllm.chat_format.format import ChatFormat, ReasoningFormat


def begins_in(format: ChatFormat, prompt: str, continued: str | None = None) -> str:
    """Returns the part that an output begins within: ``""``, ``"reasoning"`` or ``"content"``.

    Args:
        format: the model's format.
        prompt: the rendered prompt.
        continued: the message that the output continues; None if it begins a new one.
    """
    reasoning = format.reasoning
    if reasoning is not None and _is_open(reasoning, format.header, prompt, continued):
        return "reasoning"
    if continued is not None:
        return "content"
    ended = reasoning is None or prompt.rstrip().endswith(reasoning.end)
    return "reasoning" if reasoning is not None and reasoning.implied and not ended else ""


def _is_open(reasoning: ReasoningFormat, header: str, prompt: str, continued: str | None) -> bool:
    """True if the message that the prompt ends with has begun reasoning, and not ended it."""
    message = prompt[prompt.rfind(header) + len(header) :] if header and header in prompt else continued or ""
    if message.rfind(reasoning.begin) > message.rfind(reasoning.end):
        return True
    return prompt.rstrip().endswith(reasoning.begin)
