"""Driver of the cases: options from a function's signature, alternating rounds, rows as JSON or as a table.

A case is a module of `bench` with a function of the same name.  Keyword-only parameters are its options: an
annotation gives the type, and ``Annotated[int, "help"]`` the help; a callable in it reads the value.  The
module's docstring is the description.  The function prints, or yields rows, which are printed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bench.records import table

T = TypeVar("T")
Row = dict[str, Any]
DIGITS = 5
"""Significant digits of the numbers in rows."""


def run(function: Callable[..., Any], arguments: Sequence[str] | None = None) -> None:
    """Runs a case with the options of the command line, and prints the rows that it yields."""
    options = parsed(function, arguments)
    as_table = options.pop("table")
    if options.pop("plain_read"):
        from bench.ops.limits import machine_line

        print(machine_line(), file=sys.stderr, flush=True)
    kept = []
    for row in function(**options) or ():
        rounded = {name: _rounded(value) for name, value in row.items()}
        kept.append(rounded)
        if not as_table:
            print(json.dumps(rounded), flush=True)
    if as_table:
        header = list(dict.fromkeys(name for row in kept for name in row))
        print(table(header, ([row.get(name) for name in header] for row in kept)))


def parsed(function: Callable[..., Any], arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the options of a case, by the names of its parameters."""
    description = inspect.getdoc(inspect.getmodule(function)) or ""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {function.__name__}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        _add(parser, parameter, hints[parameter.name])
    parser.add_argument("--table", action="store_true", help="prints a table at the end in place of JSON")
    parser.add_argument("--plain-read", action="store_true", help="prints the CPU and its plain read first")
    return vars(parser.parse_args(arguments))


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any) -> None:
    given: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *given = get_args(hint)
    settings: dict[str, Any] = {"help": next((text for text in given if isinstance(text, str)), None)}
    option = ("-" if len(parameter.name) == 1 else "--") + parameter.name.replace("_", "-")
    if hint is bool:
        parser.add_argument(option, action="store_true", **settings)
        return
    default = parameter.default
    settings |= {"required": True} if default is parameter.empty else {"default": default}
    read = next((text for text in given if callable(text)), None)
    parser.add_argument(option, **settings, **({"type": _shown(read)} if read else _type(hint)))


def _type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        return {"type": lambda text: tuple(kind(part) for part in text.split(",")), "metavar": "A,B"}
    return {"type": hint}


def _shown(read: Callable[[str], T]) -> Callable[[str], T]:
    """Returns a type of option whose errors argparse shows."""

    def choice(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return choice


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def in_rounds(sides: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Calls every side once a round with the round's number, and returns what it gave in all but the first.

    The first round warms up.  The order turns round each time.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sorted(sides, key=list(sides).index, reverse=bool(number % 2)):
            result = sides[name](number)
            if number:
                found[name].append(result)
    return found


def ratios(some: Iterable[float], others: Iterable[float]) -> list[float]:
    """Returns the ratios of neighboring rounds."""
    return [a / b for a, b in zip(some, others, strict=True)]


def in_process(case: str, **options: Any) -> Row:
    """Runs a case of `bench` in a process of its own, and returns its last row."""
    command = [sys.executable, "-m", f"bench.{case}"]
    for name, value in options.items():
        if value is not None and value is not False:
            command += [f"--{name}", *([] if value is True else [str(value)])]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: Row = json.loads(output.splitlines()[-1])
    return row


@contextmanager
def random_folder(shape: str, folder: Path | None = None, **changes: Any) -> Iterator[Path]:
    """Gives a folder with a quantized model of random weights.

    Args:
        shape: one of the engines' comparison.
        folder: is kept, and a model that it holds is used as it is; None: a temporary one.
        changes: to the shape's configuration.
    """
    from transformers import AutoConfig

    from bench.peers.shapes import SHAPES
    from torch_armllm.benchmark.random_model import save_random_model

    with TemporaryDirectory() as temporary:
        home = folder or Path(temporary)
        if not (home / "config.json").exists():
            save_random_model(AutoConfig.for_model(**{**SHAPES[shape].config, **changes}), home)
        yield home
