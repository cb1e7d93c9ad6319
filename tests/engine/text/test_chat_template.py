"""Chat templates: equality with transformers, and bounds of time, memory and output."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.rank_processes import ended
from torch_armllm.engine.text.chat_template import NOT_VARIABLES, render_chat
from torch_armllm.engine.text.prompt_limit import PromptLimit
from torch_armllm.engine.text.template_process import TemplateError, TemplateProcess

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TALK = [
    {"role": "user", "content": "Hi <b> é \ud800"},
    {"role": "assistant", "content": "Yes", "name": None},
    {"role": "user", "content": "x"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "<s>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", bos_token="<s>")
    made.chat_template = PLAIN
    return made


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(seconds=1, memory=64 << 20, characters=1000)
    yield made
    made.close()


def render(process: TemplateProcess, template: str, **options: Any) -> str:
    return process.render(
        conversations=[[{"role": "user", "content": "Hi"}]], chat_template=template, **options
    )


def add(left: int) -> int:
    """Adds one.

    Args:
        left: a number.
    """
    return left + 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"mood": "calm", "bos_token": "<other>"},
        {"continue_final_message": True},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"tools": [add], "chat_template": "{{ tools[0].function.name }}"},
    ],
)
def test_texts_equal_those_of_transformers(
    options: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, **options)
    talk = [{**message, "content": message["content"].replace("\ud800", "")} for message in TALK]
    assert render_chat(tokenizer, talk, **options)["prompt"] == expected.replace("\ud800", "")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "did not render within 1 s"),
        ("{{ 'x' * 10**10 }}", "more than 64 MiB of memory"),
        (
            "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "memory",
        ),
        ("{{ 'x' * 1001 }}", "wrote 1001 characters; at most 1000 are allowed"),
    ],
)
def test_bounds(template: str, message: str, process: TemplateProcess) -> None:
    with pytest.raises(ValueError, match=message):
        render(process, template)
    assert render(process, PLAIN) == "<user>Hi"  # the next one is not affected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "Expected an expression"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_errors_of_templates(template: str, message: str, process: TemplateProcess) -> None:
    with pytest.raises(TemplateError, match=message):
        render(process, template)
    assert render(process, PLAIN) == "<user>Hi"


def test_a_process_that_ended_is_replaced(process: TemplateProcess) -> None:
    assert render(process, PLAIN) == "<user>Hi"
    assert process._child is not None
    process._child.kill()
    process._child.wait()
    with pytest.raises(ValueError, match="did not render|ended the process"):
        render(process, PLAIN)
    assert render(process, PLAIN) == "<user>Hi"


def test_threads_share_a_process(process: TemplateProcess) -> None:
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda index: render(process, "{{ mood }}", mood=index), range(40)))
    assert texts == [str(index) for index in range(40)]


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "import os\n"
        "from torch_armllm.engine.text.template_process import SHARED\n"
        "SHARED.start()\n"
        "print(SHARED._child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended(int(done.stdout))


def test_a_forked_process_starts_its_own(process: TemplateProcess) -> None:
    assert render(process, PLAIN) == "<user>Hi"
    ours, child = process._child, os.fork()
    if child == 0:
        try:
            right = render(process, PLAIN) == "<user>Hi" and process._child is not ours
            process.close()
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render(process, PLAIN) == "<user>Hi" and process._child is ours


def test_long_texts_are_not_tokenized(tokenizer: PreTrainedTokenizerFast) -> None:
    limit = PromptLimit(tokenizer, 4)
    talk = [{"role": "user", "content": "a"}]
    render_chat(tokenizer, talk, limit, chat_template="{{ 'a' * 20 }}")
    with pytest.raises(ValueError, match="the prompt has 21 characters"):
        render_chat(tokenizer, talk, limit, chat_template="{{ 'a' * 21 }}")


def test_wrong_input(tokenizer: PreTrainedTokenizerFast) -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    for name in sorted(NOT_VARIABLES - {"chat_template", "tokenizer", "conversation"}):
        with pytest.raises(ValueError, match=f"chat_template_kwargs sets {name}"):
            render_chat(tokenizer, talk, **{name: True})
    for wrong, options, message in (
        ([], {}, "conversation is empty"),
        ([{"role": "user", "content": threading.Lock()}], {}, "holds lock: give strings"),
        (talk, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (
            talk,
            {"chat_template": "{{ nothing.at.all }}"},
            "refuses this conversation: 'nothing' is undefined",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            render_chat(tokenizer, wrong, **options)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        render_chat(tokenizer, talk)
    with pytest.raises(ValueError, match="no tokenizer"):
        render_chat(None, talk)
