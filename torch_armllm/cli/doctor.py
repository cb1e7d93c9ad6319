"""The command ``torch-armllm doctor``."""

from __future__ import annotations

import argparse
import json

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli.parser import Parser


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "doctor",
        "check this machine and installation, and say what to change",
        "torch-armllm doctor",
        "torch-armllm doctor --json | jq .verdict",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    """Prints the findings and the verdict; returns 1 if something should be changed."""
    from torch_armllm.engine.checkup import examine, render, verdict
    from torch_armllm.engine.diagnostics import describe

    machine = describe()
    findings = examine(machine)
    if options.json:
        listed = [finding.to_dict() for finding in findings]
        print(json.dumps({"verdict": verdict(findings), "findings": listed, "env": machine}))
    else:
        print(render(findings))
    return int(any(finding.remedy for finding in findings))
