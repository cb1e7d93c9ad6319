"""``torch-armllm env``."""

from __future__ import annotations

import argparse
import json

from torch_armllm.cli import Subcommands


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command to the command line."""
    parser = commands.add_parser("env", help="what this machine offers and what is in the way")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Prints what was found."""
    from torch_armllm.engine.diagnostics import describe, render, warnings

    found = describe()
    print(json.dumps({**found, "warnings": warnings(found)}) if options.json else render(found))
