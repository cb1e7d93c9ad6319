"""Places of images, sound and videos in conversations, as a chat template shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch_armllm.engine.media.taken_media import MODALITIES, PLURALS
from torch_armllm.engine.text.template_process import SHARED, TemplateError

_BEFORE, _AFTER = "what is", "this one"
_Form = Literal["part", "mark", "string"]


class PlacedMessages(NamedTuple):
    """Messages in the form that a chat template shows with their media.

    Attributes:
        messages: the messages.
        content_format: of their contents.
    """

    messages: list[dict[str, Any]]
    content_format: Literal["openai", "string"]


def placed(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    special_tokens: Mapping[str, Any],
    marks: Mapping[str, str],
) -> PlacedMessages:
    """Returns messages whose media a chat template shows.

    Most templates show parts ``{"type": "image"}``, ``{"type": "audio"}`` and ``{"type": "video"}``.  Some
    leave them out, and some know texts alone: there the model's placeholder is written into the text.

    Args:
        messages: contents are texts, or lists with such parts.
        template: the template's text; empty if the tokenizer renders by its own code.
        special_tokens: variables of the template.
        marks: placeholders by modality, as far as they are known.

    Raises:
        ValueError: a placeholder is needed, and not known.
    """
    parts = (part for message in messages for part in _parts(message))
    modalities = sorted({part["type"] for part in parts if part.get("type") in MODALITIES})
    tokens = tuple((name, text) for name, text in special_tokens.items() if isinstance(text, str))
    forms = {each: _form(template, tokens, each) if template else "part" for each in modalities}
    if missing := [each for each, form in forms.items() if form != "part" and each not in marks]:
        raise ValueError(
            f"the chat template shows no {PLURALS[missing[0]]}, and the model's processor names no "
            "placeholder for them: give chat_template, or use generate with the placeholder in the prompt"
        )
    if "string" in forms.values():
        return PlacedMessages([_as_string(message, marks) for message in messages], "string")
    written = {each: marks[each] for each, form in forms.items() if form == "mark"}
    return PlacedMessages([_with_marks(message, written) for message in messages], "openai")


def marks_of(processor: Any) -> dict[str, str]:
    """Returns the placeholders of a processor by modality, as far as it names them."""
    holders = processor, getattr(processor, "tokenizer", None)
    found = {}
    for modality in MODALITIES:
        names = (getattr(holder, f"{modality}_token", None) for holder in holders)
        if (mark := next((name for name in names if isinstance(name, str) and name), None)) is not None:
            found[modality] = mark
    return found


@lru_cache(maxsize=64)
def _form(template: str, tokens: tuple[tuple[str, str], ...], modality: str) -> _Form:
    """Returns how a template takes media: as parts, as marks in parts of text, or in contents of text."""

    def shown(content: Any) -> str | None:
        messages = [{"role": "user", "content": content}]
        given = {"tools": None, "add_generation_prompt": False, **dict(tokens)}
        try:
            text = SHARED.render(conversations=[messages], chat_template=template, **given)
        except (ValueError, TemplateError):
            return None
        # a list that is printed as it is has names of fields in it
        return text if _BEFORE in text and _AFTER in text and "'type'" not in text else None

    before, after = ({"type": "text", "text": text} for text in (_BEFORE, _AFTER))
    without = shown([before, after])
    found = shown([before, {"type": modality}, after])
    if found is not None and found != without:
        return "part"
    if without is not None:
        return "mark"
    return "string" if shown(f"{_BEFORE} {_AFTER}") is not None else "part"


def _as_string(message: Mapping[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    """Returns a message whose content is a text: marks next to texts, and texts on lines of their own."""
    if not isinstance(message.get("content"), list):
        return dict(message)
    text, was_text = "", False
    for part, mark in _marked(message, marks):
        text += "\n" if was_text and mark is None else ""
        text += mark if mark is not None else str(part.get("text", ""))
        was_text = mark is None
    return {**message, "content": text}


def _with_marks(message: Mapping[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    """Returns a message with texts in the places of media."""
    if not isinstance(message.get("content"), list):
        return dict(message)
    content = [
        part if mark is None else {"type": "text", "text": mark} for part, mark in _marked(message, marks)
    ]
    return {**message, "content": content}


def _marked(
    message: Mapping[str, Any], marks: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Yields the parts of a message, and the placeholders to write in the places of media.

    Media whose placeholders the message's texts hold already, as some models' users write them, are left out.
    """
    texts = "".join(str(part.get("text", "")) for part in _parts(message))
    written = Counter({modality: texts.count(mark) for modality, mark in marks.items()})
    for part in _parts(message):
        kind = part.get("type", "")
        if kind not in marks:
            yield part, None
        elif written[kind]:
            written[kind] -= 1
        else:
            yield part, marks[kind]


def _parts(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
