"""Texts as a forest of what they share, so that a common beginning is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LEAST = 8
"""Tokens that are worth a node of their own."""


@dataclass
class Node:
    """Positions ``start … end − 1`` of some texts that agree on all tokens up to ``end``."""

    start: int
    end: int
    texts: list[int]
    """numbers of the texts"""
    children: list[Node] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def grow(texts: Sequence[Sequence[int]], least: int = LEAST) -> list[Node]:
    """The forest of token sequences.

    Args:
        texts: none of them empty; equal ones share all of their nodes.
        least: shorter common pieces are not shared.
    """
    order = sorted(range(len(texts)), key=lambda number: tuple(texts[number]))
    return _grow(texts, order, 0, least)


def _grow(texts: Sequence[Sequence[int]], order: list[int], start: int, least: int) -> list[Node]:
    """Nodes of sorted texts that agree up to ``start`` and go on behind it."""
    nodes: list[Node] = []
    run: list[int] = []
    end = 0
    for number in order:
        text = texts[number]
        if run:
            before = texts[run[-1]]
            common = _common(before, text, start)
            if common >= start + least or common == len(before) == len(text):
                run.append(number)
                end = min(end, common)
                continue
            nodes.append(_close(texts, run, start, end, least))
        run, end = [number], len(text)
    if run:
        nodes.append(_close(texts, run, start, end, least))
    return nodes


def _close(texts: Sequence[Sequence[int]], run: list[int], start: int, end: int, least: int) -> Node:
    longer = [number for number in run if len(texts[number]) > end]
    return Node(start, end, run, _grow(texts, longer, end, least))


def _common(a: Sequence[int], b: Sequence[int], start: int) -> int:
    """Length of what two texts have in common, which is ``start`` at least."""
    most = min(len(a), len(b))
    return next((i for i in range(start, most) if a[i] != b[i]), most)
