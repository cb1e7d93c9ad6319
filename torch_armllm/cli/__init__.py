"""The command line: one file per command, with ``add_parser`` for its options and ``run`` for its work.

Commands import heavy modules when they run, not before: ``--help`` must answer at once.
"""

from __future__ import annotations

import argparse
from typing import TypeAlias

from torch_armllm.cli.parser import Parser

Subcommands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_model(parser: Parser, number: str | None = "?") -> None:
    """Adds the model to a command.

    Args:
        parser: of the command.
        number: ``?``: one or none; ``*``: any number; None: one, which has to be given.
    """
    default = {"?": "smollm2", "*": ["smollm2"]}.get(number or "")
    known = "smollm2, smollm2-moe, a folder or a hub name"
    parser.add_argument("model", nargs=number, default=default, help=known)


def add_command(commands: Subcommands, name: str, about: str, *examples: str) -> Parser:
    """Adds a command and returns its parser.

    Args:
        commands: the commands of the parent.
        name: of the command.
        about: its purpose in a few words, which begin with a verb in lower case.
        examples: command lines; what follows ``#`` says what they do.
    """
    epilog = "\n  ".join(["examples:", *examples]) if examples else None
    return commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=epilog)
