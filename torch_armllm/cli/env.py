"""The command ``torch-armllm env``."""

from __future__ import annotations

import argparse
import json

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli.parser import Parser


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "env",
        "show the CPU's features, kernels and settings",
        "torch-armllm env",
        "torch-armllm env --json          # for a report of an error",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Prints the description of the machine and the process."""
    from torch_armllm.engine.reports.diagnostics import describe, render, warnings

    machine = describe()
    print(json.dumps({**machine, "warnings": warnings(machine)}) if options.json else render(machine))
