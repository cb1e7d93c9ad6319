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
        "check this machine and installation, and say what to change; or print a model's chat format",
        "torch-armllm doctor",
        "torch-armllm doctor smollm2",
        "torch-armllm doctor --json | jq .verdict",
    )
    parser.add_argument(
        "model", nargs="?", help="smollm2, a folder or a hub name: how the model writes reasoning and calls"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    """Prints the findings and the verdict, or a chat format; returns 1 if something should be changed."""
    if options.model is not None:
        return _chat_format(options.model, options.json)
    from torch_armllm.engine.reports.checkup import examine, render, verdict
    from torch_armllm.engine.reports.diagnostics import describe

    machine = describe()
    findings = examine(machine)
    if options.json:
        listed = [finding.to_dict() for finding in findings]
        print(json.dumps({"verdict": verdict(findings), "findings": listed, "env": machine}))
    else:
        print(render(findings))
    return int(any(finding.remedy for finding in findings))


def _chat_format(model: str, as_json: bool) -> int:
    """Prints how a model writes reasoning and tool calls; returns 1 if its calls cannot be parsed."""
    from torch_armllm.chat_format.rendering import template_format, tokenizer_renderer
    from torch_armllm.chat_format.report import describe_format
    from torch_armllm.chat_format.trial import trial
    from torch_armllm.checkpoint.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    template = str(tokenizer.chat_template or "")
    if not template:
        raise ValueError(f"{model} has no chat template")
    render = tokenizer_renderer(tokenizer, template)
    format = template_format(render, template, tokenizer.get_vocab())
    problem = trial(format, render)
    described = describe_format(format, problem)
    if as_json:
        print(json.dumps(described, ensure_ascii=False))
    else:
        width = max(map(len, described))
        for name, value in described.items():
            print(f"{name:<{width}}  {value if isinstance(value, str) else json.dumps(value)}")
    return int(problem is not None)
