"""Assignment of schemes to layers, so that a model has a given size and loses least."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A layer, or several that must have the same scheme, and what each scheme costs.

    Attributes:
        names: names of the layers.
        size: bits in all, by scheme.
        loss: loss of accuracy, by scheme; losses of different layers add up.
    """

    names: tuple[str, ...]
    size: Mapping[str, float]
    loss: Mapping[str, float]

    def among(self, schemes: Collection[str]) -> Choice:
        """Returns the choice with some of its schemes."""
        return Choice(self.names, {x: self.size[x] for x in schemes}, {x: self.loss[x] for x in schemes})


def joined(choices: Sequence[Choice], units: Sequence[Hashable]) -> list[Choice]:
    """Joins the choices that belong to the same unit."""
    members: dict[Hashable, list[Choice]] = defaultdict(list)
    for choice, unit in zip(choices, units, strict=True):
        members[unit].append(choice)
    return [
        Choice(
            tuple(name for x in several for name in x.names),
            {scheme: sum(x.size[scheme] for x in several) for scheme in several[0].size},
            {scheme: sum(x.loss[scheme] for x in several) for scheme in several[0].loss},
        )
        for several in members.values()
    ]


def allocate(choices: Sequence[Choice], size: float) -> dict[str, str]:
    """Chooses a scheme for each layer: the least loss in at most ``size`` bits.

    This is the knapsack problem with several weights an item.  Starting from the smallest scheme everywhere,
    the step that saves most loss for each bit is taken as long as one fits, which is optimal up to the last
    steps.

    Returns:
        The schemes by layer name.

    Raises:
        ValueError: the smallest schemes need more than ``size``; the message has the bits.
    """
    chosen = [min(x.size, key=lambda scheme, x=x: (x.size[scheme], x.loss[scheme])) for x in choices]  # type: ignore[misc]  # mypy knows no lambda defaults
    left = size - sum(x.size[scheme] for x, scheme in zip(choices, chosen, strict=True))
    if left < 0:
        raise ValueError(f"{size:.0f} bits are less than the {size - left:.0f} of the smallest schemes")
    while True:
        steps = [
            ((x.loss[now] - x.loss[scheme]) / (x.size[scheme] - x.size[now]), index, scheme)
            for index, (x, now) in enumerate(zip(choices, chosen, strict=True))
            for scheme in x.size
            if 0 < x.size[scheme] - x.size[now] <= left and x.loss[scheme] < x.loss[now]
        ]
        if not steps:
            break
        _, index, scheme = max(steps)
        left -= choices[index].size[scheme] - choices[index].size[chosen[index]]
        chosen[index] = scheme
    return {name: scheme for x, scheme in zip(choices, chosen, strict=True) for name in x.names}
