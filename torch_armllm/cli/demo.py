"""The command ``torch-armllm demo``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import add_settings, read_settings
from torch_armllm.system.settings import COUNT, TEXTS, setting


@dataclass(frozen=True)
class _Demo:
    """Questions, and how long the answers get."""

    prompt: tuple[str, ...] | None = setting(None, TEXTS, "a user message", none="three questions")
    max_new_tokens: int = setting(48, COUNT, "maximum number of tokens to generate per reply")


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "demo",
        "compare a model in bfloat16 and in INT4, side by side",
        "torch-armllm demo",
        'torch-armllm demo MODEL --prompt "What is a prime number?" --max-new-tokens 100',
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a checkpoint's folder or a hub name (default: the bundled SmolLM2, dense and as a "
        "Mixture-of-Experts)",
    )
    add_settings(parser, _Demo)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Runs the demo."""
    from torch_armllm.cli.demo_view import PROMPTS, run_demo

    chosen = read_settings(options, _Demo)
    run_demo(options.model, chosen.prompt or PROMPTS, chosen.max_new_tokens)
