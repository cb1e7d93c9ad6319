"""The command ``torch-armllm env``."""

from __future__ import annotations

import argparse
import json

from torch_armllm.cli import Subcommands


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command and its options to the parser."""
    parser = commands.add_parser("env", help="show the CPU's features, kernels and settings")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Prints the description of the machine and the process."""
    from torch_armllm.engine.diagnostics import describe, render, warnings

    machine = describe()
    print(json.dumps({**machine, "warnings": warnings(machine)}) if options.json else render(machine))
