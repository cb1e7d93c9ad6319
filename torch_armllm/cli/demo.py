"""The command ``torch-armllm demo``."""

from __future__ import annotations

import argparse

from torch_armllm.cli import Subcommands


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command and its options to the parser."""
    parser = commands.add_parser("demo", help="compare a model in bfloat16 and in INT4, side by side")
    parser.add_argument(
        "--model", help="a checkpoint's folder or a hub name; default: the bundled SmolLM2, dense and as MoE"
    )
    parser.add_argument("--prompt", action="append", help="a user message; repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="most tokens per reply (48)")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Runs the demo."""
    from torch_armllm.cli.demo_view import PROMPTS, run_demo

    run_demo(options.model, options.prompt or PROMPTS, options.max_new_tokens)
