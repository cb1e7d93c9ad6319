"""A scripted model for coding agents: it writes given calls in the format of a chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.server_live import Live
from torch_armllm.chat_format.chat_renderer import ChatInput
from torch_armllm.chat_format.message_parts import text_of
from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind

READ = ("read_file", "read", "Read")
EDIT = ("edit", "Edit", "replace")
RUN = ("run_shell_command", "bash", "Bash", "exec_command", "shell_command", "shell")
PATH = ("file_path", "filePath", "absolute_path", "path")
ENDS = ("<|im_end|>", "<|call|>", "<|return|>", "<|end|>", "<｜end▁of▁sentence｜>", "<EOS>", "</s>")
"""Tokens that end a turn: an engine stops at them and does not show them."""

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Read:
    """Reads a file."""

    path: str

    def call(self, tools: Schemas) -> tuple[str, dict[str, Any]]:
        name = _first(READ, tools)
        if name is None:
            return Run(f"cat {self.path}").call(tools)
        return name, {_first(PATH, tools[name]): self.path}


@dataclass(frozen=True)
class Edit:
    """Replaces a text in a file."""

    path: str
    old: str
    new: str

    def call(self, tools: Schemas) -> tuple[str, dict[str, Any]]:
        name = _first(EDIT, tools)
        if name is None:
            removed = "".join(f"-{line}\n" for line in self.old.splitlines())
            added = "".join(f"+{line}\n" for line in self.new.splitlines())
            patch = f"*** Begin Patch\n*** Update File: {self.path}\n@@\n{removed}{added}*** End Patch\n"
            if "apply_patch" in tools:
                return "apply_patch", {"input": patch}
            return Run(f"apply_patch <<'EOF'\n{patch}EOF").call(tools)
        values = {("old_string", "oldString"): self.old, ("new_string", "newString"): self.new}
        arguments = {_first(names, tools[name]): value for names, value in values.items()}
        return name, {_first(PATH, tools[name]): self.path, **arguments}


@dataclass(frozen=True)
class Run:
    """Runs a command."""

    command: str

    def call(self, tools: Schemas) -> tuple[str, dict[str, Any]]:
        name = _first(RUN, tools)
        assert name is not None, f"no tool runs commands: {sorted(tools)}"
        key = _first(("command", "cmd"), tools[name])
        more = {"description": "Run it", "is_background": False}
        return name, {key: self.command, **{k: v for k, v in more.items() if k in tools[name]}}


def _first(names: Sequence[str], among: Mapping[str, Any]) -> Any:
    return next((name for name in names if name in among), None)


@dataclass
class Script:
    """The calls of a model, one a turn, and its last message.

    Attributes:
        steps: the calls.
        answer: the last message.
        seen: every conversation with tools that was sent to the model.
        outputs: what the model wrote to each.
    """

    steps: Sequence[Read | Edit | Run]
    answer: str
    seen: list[ChatInput] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[str]:
        """The results of the calls in the last conversation."""
        messages = self.seen[-1].messages if self.seen else []
        return [text_of(message["content"]) for message in messages if message["role"] == "tool"]

    def message(self, given: ChatInput) -> dict[str, Any]:
        """Returns the next message of the assistant."""
        if not given.tools:  # a client asks for a title, or for the topic
            return {"role": "assistant", "content": "A short title"}
        done = sum(message["role"] == "tool" for message in given.messages)
        if done >= len(self.steps):
            return {"role": "assistant", "content": self.answer}
        functions = [tool["function"] for tool in given.tools]
        tools = {each["name"]: each.get("parameters", {}).get("properties", {}) for each in functions}
        name, arguments = self.steps[done].call(tools)
        call = {"name": name, "arguments": json.dumps(arguments)}
        tool_call = {"type": "function", "id": f"call{done:05}", "function": call}
        return {"role": "assistant", "content": "", "tool_calls": [tool_call]}


def _continuation(prompt: str, whole: str) -> str:
    """Returns what follows a prompt; some templates begin a message otherwise than they show it later."""
    same = len(os.path.commonprefix([prompt, whole]))
    begun, rest = prompt[same:], whole[same:]
    assert len(begun) < 40, f"{prompt[-200:]!r} is continued by {whole[-400:]!r}"
    overlap = next(n for n in range(len(begun), -1, -1) if rest.startswith(begun[len(begun) - n :]))
    return rest[overlap:]


@contextmanager
def playing(server: Live, script: Script, size: int = 7) -> Iterator[Script]:
    """Makes the model of a server follow a script, in pieces of ``size`` characters.

    Its text is what the chat template makes of the next message.
    """
    served: Any = server.served
    renderer = served.prompts._renderer
    render = renderer.render
    inputs: dict[str, ChatInput] = {}

    def noted(given: ChatInput) -> tuple[str, list[str]]:
        text, warnings = render(given)
        inputs[text] = given
        return text, warnings

    def written(prompt: str) -> str:
        given = inputs[prompt]
        messages = [*given.messages, script.message(given)]
        whole, _ = render(replace(given, messages=messages, begins=False))
        text = _continuation(prompt, whole).strip()
        for end in ENDS:
            text = text.removesuffix(end)
        if given.tools:
            script.seen.append(given)
            script.outputs.append(text)
        return text

    async def generate(prompt: Any, params: Any, request_id: str, priority: int = 0, *_: Any) -> Any:
        tokenizer = served.prompts.tokenizer
        text = written(prompt["prompt"])
        step = len(text) if params.output_kind is RequestOutputKind.FINAL_ONLY else size
        given = prompt["prompt"], prompt["prompt_token_ids"]
        for at in range(0, len(text), step):
            last = at + step >= len(text)
            ids = tokenizer(text[at : at + step], add_special_tokens=False)["input_ids"]
            piece = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
            output = CompletionOutput(0, piece, ids, finish_reason="stop" if last else None)
            yield RequestOutput(request_id, *given, None, [output], last)

    renderer.render, served.generate = noted, generate
    try:
        yield script
    finally:
        del renderer.render, served.generate
