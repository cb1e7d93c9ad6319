"""A forest of the common prefixes of token sequences, so that each is prefilled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_SHARED = 8
"""Minimum of common tokens for a node of their own."""


@dataclass
class Node:
    """Positions ``start … end − 1`` of sequences with the same tokens up to ``end``."""

    start: int
    end: int
    sequences: list[int]
    """indices of the sequences"""
    children: list[Node] = field(default_factory=list)


def build_forest(sequences: Sequence[Sequence[int]], least: int = MIN_SHARED) -> list[Node]:
    """Builds the forest of token sequences.

    Args:
        sequences: non-empty sequences; equal ones share all of their nodes.
        least: shorter common pieces are not shared.
    """
    order = sorted(range(len(sequences)), key=lambda number: tuple(sequences[number]))
    return _build_forest(sequences, order, 0, least)


def _build_forest(sequences: Sequence[Sequence[int]], order: list[int], start: int, least: int) -> list[Node]:
    """Builds the nodes of sorted sequences that agree up to ``start`` and are longer."""
    nodes: list[Node] = []
    run: list[int] = []
    end = 0
    for number in order:
        sequence = sequences[number]
        if run:
            before = sequences[run[-1]]
            common = _common(before, sequence, start)
            if common >= start + least or common == len(before) == len(sequence):
                run.append(number)
                end = min(end, common)
                continue
            nodes.append(_close(sequences, run, start, end, least))
        run, end = [number], len(sequence)
    if run:
        nodes.append(_close(sequences, run, start, end, least))
    return nodes


def _close(sequences: Sequence[Sequence[int]], run: list[int], start: int, end: int, least: int) -> Node:
    longer = [number for number in run if len(sequences[number]) > end]
    return Node(start, end, run, _build_forest(sequences, longer, end, least))


def _common(a: Sequence[int], b: Sequence[int], start: int) -> int:
    """Returns the length of the common prefix of two sequences, at least ``start``."""
    most = min(len(a), len(b))
    return next((i for i in range(start, most) if a[i] != b[i]), most)
