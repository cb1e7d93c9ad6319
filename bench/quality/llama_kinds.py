"""Kinds of llama.cpp's files to compare with, as options name them: ``q4_k_m+padded+imatrix``."""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("q4_0", "iq4_nl", "iq4_xs", "q4_k_s", "q4_k_m")
DEFAULT = (
    "q4_0,iq4_nl+imatrix,iq4_xs+padded+imatrix,q4_k_s+padded+imatrix,"
    "q4_k_m+padded,q4_k_m+padded+imatrix,q4_k_m,q4_k_m+imatrix"
)
BLOCK = 256
"""Values of a block of the K formats and of IQ4_XS; other rows fall back to formats of more bits."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        format: one of `KINDS`.
        imatrix: whether it is quantized with an importance matrix.
        padded: whether rows are made a multiple of `BLOCK` values by zeros first.
    """

    format: str
    imatrix: bool = False
    padded: bool = False

    def __str__(self) -> str:
        """Returns the name of its row in the table."""
        parts = [self.format.upper(), "padded" * self.padded, "imatrix" * self.imatrix]
        return ", ".join(filter(None, parts))


def kinds(text: str) -> list[Kind]:
    """Returns the kinds that an option names, separated by commas.

    Raises:
        ValueError: a format or what follows ``+`` is unknown.
    """
    return [_kind(name) for name in filter(None, text.lower().split(","))]


def _kind(name: str) -> Kind:
    form, *ways = name.split("+")
    if form not in KINDS:
        raise ValueError(f"{name} names no format to compare with; use one of {', '.join(KINDS)}")
    if unknown := set(ways) - {"imatrix", "padded"}:
        raise ValueError(f"{name} asks for {min(unknown)!r}; only +padded and +imatrix can follow a format")
    return Kind(form, "imatrix" in ways, "padded" in ways)


def without_padding(chosen: list[Kind]) -> list[Kind]:
    """Returns the kinds for a model whose rows need no zeros, each of them once."""
    return list(dict.fromkeys(replace(kind, padded=False) for kind in chosen))
