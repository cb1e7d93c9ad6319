"""Chat templates of published models, and what models write after them: facts that lie beside a checkout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from torch_armllm.chat_format.template_traits import Message, TemplateTraits
from torch_armllm.chat_format.trait_probe import Render, find_traits
from torch_armllm.engine.text.template_process import TemplateError

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "chat"
MISSING = f"the published chat templates are not there: {FOLDER}"
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>", "unk_token": "<UNK>"}


def template_names() -> list[str]:
    """Returns the names of the templates; none where they are missing."""
    return sorted(path.name for path in (FOLDER / "templates").glob("*.jinja"))


@cache
def template_text(name: str) -> str:
    return (FOLDER / "templates" / name).read_text()


@cache
def cases() -> list[dict[str, Any]]:
    with open(FOLDER / "cases.jsonl") as lines:
        return [json.loads(line) for line in lines]


def rendering(template: str) -> Render:
    """Returns what renders a template in this process."""

    def render(messages: Sequence[Message], **variables: Any) -> str:
        given = {"tools": None, "add_generation_prompt": False, **TOKENS, **variables}
        try:
            (text,), _ = render_jinja_template(
                conversations=[list(messages)], chat_template=template, **given
            )
        except Exception as error:  # as the process of templates tells it
            raise TemplateError(str(error)) from error
        return text

    return render


@cache
def traits_of_file(name: str) -> TemplateTraits:
    template = template_text(name)
    return find_traits(template, rendering(template))
