"""The command ``torch-armllm models``."""

from __future__ import annotations

import argparse
import json

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli.parser import Parser


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "models",
        "list the models of transformers and how each runs",
        "torch-armllm models llama qwen3_moe",
    )
    parser.add_argument(
        "family", nargs="*", help="model types such as llama (default: all, which takes minutes)"
    )
    parser.add_argument(
        "--media", action="store_true", help="only those that take images, videos or sound, as which they run"
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        metavar="VERSION=FILE",
        help="compare tables that --json wrote under several releases of transformers (default: survey)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--markdown", action="store_true", help="print the models page of the documentation")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Surveys the families and prints the table."""
    from torch_armllm.model_survey import page, table, versions

    if options.merge:
        print(versions.differing(versions.read_tables(options.merge)))
        return
    rows = list(table.survey_all(options.family, options.threads, only_media=options.media))
    if options.json:
        print(json.dumps([row.to_dict() for row in rows]))
    else:
        print(page.as_page(rows) if options.markdown else page.as_text(rows))
