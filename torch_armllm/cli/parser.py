"""The argument parser of the command line: short usages, suggestions for mistyped words, defaults in help."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the value and the remedy, after the usage of the command that was meant.

    Subcommands get parsers of this class, too.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*arguments, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses all arguments, and refuses those that the command does not have: nothing is left over."""
        arguments = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # before an option that is missing, which may be the mistyped one
            self._refuse_unknown_options(arguments)
        found, rest = super().parse_known_args(arguments, namespace)
        if rest:
            self._refuse(rest[0])
        return found, rest

    def format_usage(self) -> str:
        """Returns the usage: the positional arguments alone are named, as there can be 50 options."""
        self.usage = self._short_usage()
        return super().format_usage()

    def format_help(self) -> str:
        """Returns the help, after the short usage."""
        self.usage = self._short_usage()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Prints the command's own usage and the error, and exits with status 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` describes the command.\n")

    def _short_usage(self) -> str:
        positional = [action for action in self._actions if not action.option_strings]
        names = [
            "COMMAND ..." if isinstance(action, argparse._SubParsersAction) else positional_usage(action)
            for action in positional
        ]
        return " ".join([self.prog, *names, "[options]"]).replace("%", "%%")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value}: give {listed(choices)}{_suggestion(value, choices)}")
        raise argparse.ArgumentError(
            action, f"{value!r} is not a choice: give {listed(choices)}{_suggestion(str(value), choices)}"
        )

    def _refuse_unknown_options(self, arguments: Sequence[str]) -> None:
        for argument in arguments:
            if argument == "--":
                return
            name = argument.partition("=")[0]
            if not name.startswith("--") or " " in name:
                continue
            if not any(known.startswith(name) for known in self._option_string_actions):
                self._refuse(argument)

    def _refuse(self, argument: str) -> NoReturn:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {name!r}")
        if name == "--model" and any(action.dest == "model" for action in self._actions):
            self.error(f"there is no option --model: the model comes first, as in `{self.prog} MODEL`")
        self.error(f"there is no option {name}{_suggestion(name, self._option_string_actions)}")


def positional_usage(action: argparse.Action) -> str:
    """Returns a positional argument as a usage shows it, such as ``MODEL [MODEL ...]``."""
    name = str(action.metavar or action.dest).upper()
    if action.nargs == "+":
        return f"{name} [{name} ...]"
    if action.nargs == "*":
        return f"[{name} ...]"
    return f"[{name}]" if action.nargs == "?" else name


def help_text(action: argparse.Action) -> str:
    """Returns an argument's help, with its default; where the help names the default, as it is."""
    text = action.help or ""
    if isinstance(action, (argparse._HelpAction, argparse._VersionAction)) or "default:" in text:
        return text
    if action.default is None or action.default is argparse.SUPPRESS:
        return text
    return f"{text} (default: {shown(action.default)})".strip().replace("%", "%%")


def listed(names: Iterable[str]) -> str:
    """Returns names as a choice: ``a, b or c``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def shown(value: Any) -> str:
    """Returns a default as a help names it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return " ".join(map(shown, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _suggestion(word: str, known: Iterable[str]) -> str:
    """Returns the question after a mistyped word; an empty text if nothing resembles it."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        return help_text(action)
