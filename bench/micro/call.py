"""Calls of single ops, and the table of all that are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

BF16 = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
        run: makes it.
        read: bytes that it has to read and write; 0: they do not limit it.
        operations: of it, additions and multiplications each; 0: none are counted.
        threads: that compute; None: torch's.
    """

    run: Callable[[], Any]
    read: float = 0
    operations: float = 0
    threads: int | None = None


class Named(NamedTuple):
    """A call that is made when it is timed: its tensors may be large."""

    name: str
    make: Callable[[], Call]


CALLS: list[Named] = []


def over(**values: Iterable[Any]) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Adds a call for each combination of the values of a function's parameters."""

    def add(function: Callable[..., Call]) -> Callable[..., Call]:
        for each in product(*values.values()):
            chosen = dict(zip(values, each, strict=True))
            text = ", ".join(f"{name}={_shown(value)}" for name, value in chosen.items())
            CALLS.append(Named(f"{function.__name__}({text})", lambda chosen=chosen: function(**chosen)))
        return function

    return add


def _shown(value: Any) -> str:
    return str(value).removeprefix("torch.")


def in_turn(values: Iterable[Tensor]) -> Iterator[Tensor]:
    """Gives tensors one after the other, so that no call finds its own in a cache."""
    return cycle(list(values))


def sequence(queries: int, length: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns block table, starts and lengths of a sequence, whose blocks are in random order."""
    table = torch.randperm(-(-length // block)).to(torch.int32)[None]
    return table, torch.tensor([0, queries]).int(), torch.tensor([length]).int()
