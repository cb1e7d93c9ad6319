"""``torch-armllm chat``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from torch_armllm.cli import Subcommands
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments

if TYPE_CHECKING:
    from torch_armllm.llm.chat_session import ChatSession

_HELP = "/clear forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command to the command line."""
    parser = commands.add_parser("chat", help="talk to a model in the terminal")
    parser.add_argument(
        "model", nargs="?", default="smollm2", help="smollm2, a folder or a hub name (smollm2)"
    )
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of an answer (1024)")
    parser.add_argument("--temperature", type=float, help="0: always the most probable token")
    parser.add_argument(
        "--top-p", type=float, help="only the best tokens that together reach this probability"
    )
    parser.add_argument("--top-k", type=int, help="only so many best tokens")
    parser.add_argument("--repetition-penalty", type=float, help="above 1: says less again")
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Loads the model and talks until the user has enough."""
    from dataclasses import replace

    from torch_armllm.llm.chat_session import ChatSession
    from torch_armllm.llm.llm import LLM

    llm = LLM(options.model, **{"max_num_seqs": 1, **engine_arguments(options)})
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens")
    said = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    chat = ChatSession(llm, replace(llm.get_default_sampling_params(), **said), options.system)
    print(_HELP)
    while (text := _read()) is not None:
        if text == "/exit":
            break
        if text == "/clear":
            chat.clear()
        elif text.startswith("/"):
            print(_HELP)
        elif text:
            _answer(chat, text)


def _read() -> str | None:
    """What the user says; None at the end."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # arrow keys and a history
    while True:
        try:
            return input("\n> ").strip()
        except KeyboardInterrupt:
            print(f"\n({_HELP})")
        except EOFError:
            print()
            return None


def _answer(chat: ChatSession, text: str) -> None:
    try:
        for piece in chat.ask(text):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        print(f"{error}; /clear begins anew")
        return
    print(f"\n[{chat.last_turn}]")
