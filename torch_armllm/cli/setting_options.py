"""Options of the settings that a dataclass declares."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any, NamedTuple, TypeVar

from torch_armllm.cli import option_types as types
from torch_armllm.cli.parser import shown
from torch_armllm.system.settings import Kind, Setting, settings_of

T = TypeVar("T")
WHOLE, TEMPERATURE, PROBABILITY, PENALTY = map(Kind, ("whole", "temperature", "probability", "penalty"))
COUNTS, RATES, NAMES = map(Kind, ("counts", "rates", "names"))
INPUT_FOLDERS, OUTPUT_FOLDER = map(Kind, ("input folders", "output folder"))


class _Reader(NamedTuple):
    """Form of an option: the type of its text, its value in a help, an example, and how argparse takes it."""

    type: Callable[[str], Any] | None = None
    shown: str | None = None
    example: str = ""
    action: Any = None
    nargs: str | None = None


_READERS = {
    "integer": _Reader(int, "N"),
    "count": _Reader(types.positive, "N"),
    "ranks": _Reader(types.ranks, "N"),
    "port": _Reader(types.port),
    "size": _Reader(types.size, "SIZE"),
    "memory": _Reader(types.memory, "SIZE", "20GB or 0.8"),
    "seconds": _Reader(types.seconds, "SECONDS"),
    "switch": _Reader(action=argparse.BooleanOptionalAction),
    "flag": _Reader(action="store_true"),
    "choice": _Reader(),
    "dtype": _Reader(types.dtype),
    "text": _Reader(),
    "texts": _Reader(action="append"),
    "scheme": _Reader(),
    "object": _Reader(types.json_object, "JSON"),
    "drafts": _Reader(types.drafts, "JSON"),
    "folder": _Reader(shown="DIR"),
    "input file": _Reader(types.input_file, "FILE"),
    "output file": _Reader(types.output_file, "FILE"),
    "whole": _Reader(types.whole, "N"),
    "temperature": _Reader(types.temperature, "T"),
    "probability": _Reader(types.probability, "P"),
    "penalty": _Reader(types.penalty, "FACTOR"),
    "counts": _Reader(types.positive, "N", nargs="+"),
    "rates": _Reader(types.rate, "R", nargs="+"),
    "names": _Reader(shown="NAME", nargs="+"),
    "input folders": _Reader(types.input_folder, "DIR", action="append"),
    "output folder": _Reader(types.output_folder, "DIR"),
}
_NONE = ("scheme", "drafts")
"""Kinds of settings of which ``none`` means None."""


def add_settings(group: Any, owner: type, defaults: Mapping[str, Any] | None = None) -> None:
    """Adds the options of a dataclass's settings.

    Settings that are not given are left to the dataclass, whose defaults the helps name.

    Args:
        group: of the command's parser.
        owner: the dataclass.
        defaults: the command's own defaults by setting.
    """
    for field, declared in settings_of(owner):
        if declared.option is None:
            continue
        kind, default = declared.kind, (defaults or {}).get(field.name)
        reader = _READERS[kind.name]
        facts = {
            "type": reader.type,
            "choices": kind.choices or None,
            "metavar": kind.shown or reader.shown,
            "action": reader.action,
            "nargs": reader.nargs,
        }
        group.add_argument(
            _option(field, declared),
            default=default,
            help=_help(declared, field.default if default is None else default, owner),
            **{name: value for name, value in facts.items() if value is not None},
        )


def given_settings(options: argparse.Namespace, owner: type) -> dict[str, Any]:
    """Returns the values of a dataclass's settings that were given, by name."""
    found: dict[str, Any] = {}
    for field, declared in settings_of(owner):
        option = _option(field, declared).removeprefix("--").replace("-", "_")
        if (value := getattr(options, option, None)) is not None:
            if isinstance(value, list):
                value = tuple(value)
            found[field.name] = None if value == "none" and declared.kind.name in _NONE else value
    return found


def read_settings(options: argparse.Namespace, owner: type[T]) -> T:
    """Returns a dataclass of settings alone, from those that were given."""
    return owner(**given_settings(options, owner))


def _option(field: Field[Any], declared: Setting) -> str:
    return declared.option or f"--{field.name.replace('_', '-')}"


def _help(declared: Setting, default: Any, owner: type) -> str:
    """Returns the help of a setting, with its default."""
    reader = _READERS[declared.kind.name]
    text = declared.text
    if reader.example:
        text += f"; such as {reader.example}"
    if reader.action == "append":
        text += "; repeatable"
    meaning = (
        declared.none if default is None or (default == () and declared.none) else _shown(default, reader)
    )
    options = {field.name: _option(field, each) for field, each in settings_of(owner)}
    return re.sub(r"`(.*?)`", lambda match: options.get(match[1], match[1]), f"{text} (default: {meaning})")


def _shown(default: Any, reader: _Reader) -> str:
    if reader.type is types.size and default and default % 10**9 == 0:
        return f"{default // 10**9}GB"
    return shown(default)
