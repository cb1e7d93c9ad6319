"""The command ``torch-armllm demo``."""

from __future__ import annotations

import argparse

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli import option_types as types
from torch_armllm.cli.parser import Parser


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
    parser.add_argument(
        "--prompt", action="append", help="a user message; repeatable (default: three questions)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=types.positive,
        default=48,
        metavar="N",
        help="maximum number of tokens to generate per reply",
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Runs the demo."""
    from torch_armllm.cli.demo_view import PROMPTS, run_demo

    run_demo(options.model, options.prompt or PROMPTS, options.max_new_tokens)
