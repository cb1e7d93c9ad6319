"""Options of the requests that benchmarks send: prompts, their lengths, and how they are sampled."""

from __future__ import annotations

import argparse

from torch_armllm.cli import option_types as types
from torch_armllm.cli.parser import Parser


def add_workload_options(
    parser: Parser, drawn: str, *, drawn_prompts: int, temperature: float, per: str = ""
) -> None:
    """Adds the options.

    Args:
        parser: of the command.
        drawn: kind of the random prompts, for the help.
        drawn_prompts: number of those without ``--num-prompts``, for the help.
        temperature: the command's default.
        per: what has its own prompts, with a space before it, for the help.
    """
    parser.add_argument(
        "--prompts",
        type=types.input_file,
        metavar="FILE",
        help=f'.jsonl with "prompt" or "turns", or text with a prompt per line (default: {drawn})',
    )
    parser.add_argument(
        "--num-prompts",
        type=types.positive,
        metavar="N",
        help=f"number of prompts{per} (default: {drawn_prompts}; with --prompts: all)",
    )
    parser.add_argument(
        "--input-len", type=types.positive, default=128, metavar="N", help="tokens per random prompt"
    )
    parser.add_argument(
        "--output-len",
        type=types.positive,
        default=128,
        metavar="N",
        help="maximum number of tokens to generate per completion",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate up to --output-len whatever the model says (default: for random prompts only)",
    )
    parser.add_argument(
        "--temperature",
        type=types.temperature,
        default=temperature,
        metavar="T",
        help="sampling temperature; 0: greedy",
    )


def ignores_eos(options: argparse.Namespace) -> bool:
    """True if completions go on after the model's end."""
    return options.prompts is None if options.ignore_eos is None else bool(options.ignore_eos)
