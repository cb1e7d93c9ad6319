"""The command ``torch-armllm chat``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_armllm.cli import Subcommands, add_command, add_model
from torch_armllm.cli.attachments import COMMANDS, Attachments
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import (
    PENALTY,
    PROBABILITY,
    TEMPERATURE,
    WHOLE,
    add_settings,
    read_settings,
)
from torch_armllm.cli.typed_lines import TypedLines
from torch_armllm.system.settings import COUNT, TEXT, setting

if TYPE_CHECKING:
    from torch_armllm.llm.chat_session import ChatSession

_DIM, _PLAIN = "\033[2m", "\033[0m"
_OWN = "the model's own"
_HELP = "/clear starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops the current reply"


@dataclass(frozen=True)
class _Reply:
    """Settings of the answers."""

    system: str | None = setting(None, replace(TEXT, shown="TEXT"), "system message", none="none")
    max_tokens: int = setting(1024, COUNT, "maximum number of tokens to generate per reply")
    temperature: float | None = setting(None, TEMPERATURE, "sampling temperature; 0: greedy", none=_OWN)
    top_p: float | None = setting(
        None,
        PROBABILITY,
        "nucleus sampling: sample from the fewest tokens that together reach this probability",
        none=_OWN,
    )
    top_k: int | None = setting(
        None, replace(WHOLE, shown="K"), "sample from the K most probable tokens; 0: from all", none=_OWN
    )
    repetition_penalty: float | None = setting(
        None, PENALTY, "above 1: tokens that have occurred become less probable", none=_OWN
    )


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "chat",
        "chat with a model in the terminal",
        "torch-armllm chat",
        'torch-armllm chat MODEL --system "You answer in one sentence." --temperature 0.7',
    )
    add_model(parser)
    add_settings(parser, _Reply)
    add_engine_options(parser, max_num_seqs=1)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Loads the model and runs the conversation until the user quits."""
    from torch_armllm.llm.chat_session import ChatSession
    from torch_armllm.llm.llm import LLM

    llm = LLM(options.model, runner="generate", **engine_arguments(options))
    wanted = asdict(read_settings(options, _Reply))
    system = wanted.pop("system")
    chosen = {name: value for name, value in wanted.items() if value is not None}
    chat = ChatSession(llm, replace(llm.get_default_sampling_params(), **chosen), system)
    attached = Attachments(llm.input_modalities, chat.check)
    help = ", ".join([_HELP, *attached.help])
    lines = TypedLines(["/clear", "/exit", *attached.commands], attached.commands, help)
    print(help)
    while (text := lines.read()) is not None:
        command, _, rest = text.partition(" ")
        if text == "/exit":
            break
        if text == "/clear":
            chat.clear()
            attached.take()
        elif command in COMMANDS:
            _attach(attached, COMMANDS[command], rest.strip())
        elif text.startswith("/"):
            print(help)
        elif text or attached:
            _print_reply(chat, text, attached.take())


def _attach(attached: Attachments, modality: str, file: str) -> None:
    try:
        print(f"({attached.add(modality, file)} goes with the next message)")
    except ValueError as error:
        print(error)


def _print_reply(chat: ChatSession, text: str, media: Sequence[Mapping[str, Any]]) -> None:
    try:
        for piece in _shown(chat, text, sys.stdout.isatty(), media):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        print(f"{error}; /clear starts a new conversation")
        return
    print(f"\n[{chat.last_turn}]")


def _shown(
    chat: ChatSession, text: str, dims: bool, media: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str]:
    """Yields a reply in pieces, its reasoning set apart, and dimmed in a terminal."""
    dim, plain = (_DIM, _PLAIN) if dims else ("", "")
    reasoned = answered = False
    with closing(chat.ask(text, media)) as pieces:
        for piece in pieces:
            if piece.reasoning:
                reasoned = True
                yield f"{dim}{piece.reasoning}{plain}"
            if piece.content:
                yield f"\n\n{piece.content}" if reasoned and not answered else piece.content
                answered = True
