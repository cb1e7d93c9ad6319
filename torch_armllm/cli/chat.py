"""The command ``torch-armllm chat``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from torch_armllm.cli import Subcommands
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments

if TYPE_CHECKING:
    from torch_armllm.llm.chat_session import ChatSession

_HELP = "/clear starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops the current reply"


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command and its options to the parser."""
    parser = commands.add_parser("chat", help="chat with a model in the terminal")
    parser.add_argument(
        "model", nargs="?", default="smollm2", help="smollm2, smollm2-moe, a folder or a hub name (smollm2)"
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens per reply (1024)")
    parser.add_argument("--temperature", type=float, help="0: greedy; default: the model's own")
    parser.add_argument(
        "--top-p", type=float, help="sample from the fewest tokens that together reach this probability"
    )
    parser.add_argument("--top-k", type=int, help="sample from this many most probable tokens")
    parser.add_argument("--repetition-penalty", type=float, help="above 1: repeat less")
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Loads the model and runs the conversation until the user quits."""
    from dataclasses import replace

    from torch_armllm.llm.chat_session import ChatSession
    from torch_armllm.llm.llm import LLM

    llm = LLM(options.model, runner="generate", **{"max_num_seqs": 1, **engine_arguments(options)})
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens")
    overrides = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    chat = ChatSession(llm, replace(llm.get_default_sampling_params(), **overrides), options.system)
    print(_HELP)
    while (text := _read()) is not None:
        if text == "/exit":
            break
        if text == "/clear":
            chat.clear()
        elif text.startswith("/"):
            print(_HELP)
        elif text:
            _print_reply(chat, text)


def _read() -> str | None:
    """Reads a line from the user; returns None at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # line editing and history for input()
    while True:
        try:
            return input("\n> ").strip()
        except KeyboardInterrupt:
            print(f"\n({_HELP})")
        except EOFError:
            print()
            return None


def _print_reply(chat: ChatSession, text: str) -> None:
    try:
        for piece in chat.ask(text):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        print(f"{error}; /clear starts a new conversation")
        return
    print(f"\n[{chat.last_turn}]")
