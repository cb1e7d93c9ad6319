"""Places of points' names in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RADIUS = 4.0
"""Half the size of a point's marker, in the picture's points, as all lengths here."""
_HEIGHT = 8.0
_STEPS = (0, 8, -8, 15, -15, 22, -22)
"""Moves of a name beside a point, upward."""


class Rectangle(NamedTuple):
    """A rectangle from one corner to the other."""

    x0: float
    y0: float
    x1: float
    y1: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Rectangle:
        """Returns the rectangle with a center and a size."""
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def overlaps(self, other: Rectangle) -> bool:
        """True if both cover some place."""
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def holds(self, other: Rectangle) -> bool:
        """True if the other is inside."""
        return self.x0 <= other.x0 and other.x1 <= self.x1 and self.y0 <= other.y0 and other.y1 <= self.y1


def placed(
    points: Sequence[tuple[float, float]], widths: Sequence[float], panel: Rectangle
) -> list[Rectangle]:
    """Returns a rectangle for each point's name, near it and apart from all points and other names.

    Where no such place is left, the name is beside its point, on top of what is there.

    Args:
        points: centers of the points.
        widths: widths of their names.
        panel: names are inside of it, if they can be.
    """
    taken = [Rectangle.around(x, y, 2 * RADIUS, 2 * RADIUS) for x, y in points]
    names: list[Rectangle] = []
    for (x, y), width in zip(points, widths, strict=True):
        places = [Rectangle.around(x + right, y + up, width, _HEIGHT) for right, up in _offsets(width)]
        free = (p for p in places if panel.holds(p) and not any(p.overlaps(t) for t in (*taken, *names)))
        names.append(next(free, places[0]))
    return names


def _offsets(width: float) -> list[tuple[float, float]]:
    """Returns the places of a name's center from its point, the best first."""
    side = width / 2 + RADIUS + 2
    above = RADIUS + _HEIGHT / 2 + 1
    beside = [(sign * side, up) for up in _STEPS for sign in (1, -1)]
    return [*beside[:2], (0, above), (0, -above), *beside[2:]]
