"""Types of options: each returns the value of a text, or says what is wrong with it and what to give."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from torch_armllm.system.dtypes import full_dtype_name
from torch_armllm.system.files import parse_bytes

FLOATS = ("bfloat16", "float16", "float32")
"""Data types of weights."""
METHODS = ("mse", "rtn", "gptq", "awq")
"""Rounding methods of quantization."""


def whole(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def ranks(text: str) -> int | str:
    """A number of processes, or ``auto``."""
    return text if text == "auto" else _integer(text, 1)


def port(text: str) -> int:
    """A TCP port; 0 is any free one."""
    number = _integer(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port: give 1 to 65535, or 0 for any free port")
    return number


def seconds(text: str) -> float:
    """A time above 0."""
    return _number(text, "a time in seconds above 0, such as 30", above=0)


def temperature(text: str) -> float:
    """A temperature; 0 is greedy."""
    return _number(text, "0 for greedy decoding, or a temperature such as 0.7", least=0)


def probability(text: str) -> float:
    """A number above 0, at most 1."""
    return _number(text, "a probability above 0, at most 1, such as 0.9", above=0, most=1)


def penalty(text: str) -> float:
    """A factor above 0."""
    return _number(text, "a factor above 0, such as 1.1", above=0)


def rate(text: str) -> float:
    """A rate above 0; ``inf`` is allowed."""
    return _number(text, "a rate above 0, such as 2.5, or inf", above=0, finite=False)


def dtype(text: str) -> str:
    """A dtype's full name; short names such as ``bf16`` are accepted."""
    return full_dtype_name(text)


def memory(text: str) -> int | float:
    """A number of bytes, or a fraction of the free memory below 1."""
    if (size := parse_bytes(text)) is not None:
        return size
    try:
        amount = float(text.lower().removesuffix("b"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 500MB or 2GiB") from None
    return amount if amount < 1 else int(amount)


def size(text: str) -> int:
    """A number of bytes."""
    amount = memory(text)
    if amount and not isinstance(amount, int):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 500MB or 2GiB")
    return int(amount)


def json_object(text: str) -> dict[str, Any]:
    """The object of a JSON text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"name": "value"}}')
    return value


def drafts(text: str) -> dict[str, Any] | str:
    """Settings of speculative decoding, ``auto`` or ``none``."""
    return text if text in ("auto", "none") else json_object(text)


def input_file(text: str) -> Path:
    """A file that exists and can be read."""
    path = Path(text).expanduser()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: give a file")
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be read: check its permissions")
    return path


def input_folder(text: str) -> Path:
    """A folder that exists."""
    path = Path(text).expanduser()
    if path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is a file: give a folder")
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return path


def output_file(text: str) -> Path:
    """A file that can be written: its folder exists.

    This is checked first, as the file is written last, after minutes of work.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} of {text} does not exist: create it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: check the permissions of {path.parent}")
    return path


def output_folder(text: str) -> Path:
    """A folder that exists and can be written, or can be made."""
    path = Path(text).expanduser()
    for parent in (path, *path.absolute().parents):
        if parent.is_dir():
            if os.access(parent, os.W_OK | os.X_OK):
                return path
            raise argparse.ArgumentTypeError(
                f"the folder {text} cannot be made: {parent} is not writable; name another folder"
            )
        if parent.exists():
            raise argparse.ArgumentTypeError(
                f"the folder {text} cannot be made: {parent} is a file; name another folder"
            )
    return path


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return number


def _number(
    text: str,
    wanted: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    finite: bool = True,
) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (above < number <= most and number >= least) or (finite and math.isinf(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is out of range: give {wanted}")
    return number
