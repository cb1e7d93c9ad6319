"""A call of an operator in a graph, with its arguments by name."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import fx

_GETITEM = MappingProxyType({"source": 0, "index": 1})


@cache
def _places(target: Any) -> Mapping[str, int]:
    """Places of an operator's arguments by name."""
    if target is operator.getitem:
        return _GETITEM
    return {argument.name: place for place, argument in enumerate(target._schema.arguments)}


@cache
def _defaults(target: Any) -> tuple[Any, ...]:
    """Defaults of an operator's arguments, None for those that have none."""
    if target is operator.getitem:
        return (None,) * len(_GETITEM)
    return tuple(
        argument.default_value if argument.has_default_value() else None
        for argument in target._schema.arguments
    )


def in_order(target: Any, named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns an operator's arguments in their order, up to the last one that differs from its default.

    Raises:
        TypeError: the operator has no argument of a name, or needs one that is left out.
    """
    places, defaults = _places(target), _defaults(target)
    if unknown := named.keys() - places.keys():
        raise TypeError(f"{target} has no argument {min(unknown)}; it has {', '.join(places)}")
    for name, argument in zip(places, target._schema.arguments, strict=True):
        if name not in named and not argument.has_default_value():
            raise TypeError(f"{target} needs {name}")
    found = [named.get(name, defaults[place]) for name, place in places.items()]
    while found and target._schema.arguments[len(found) - 1].has_default_value():
        default = defaults[len(found) - 1]
        if type(found[-1]) is not type(default) or found[-1] != default:
            break
        found.pop()
    return tuple(found)


class OpCall:
    """A node that calls an operator: ``OpCall(node).window`` is the argument of that name.

    An argument that the call leaves out has its default.  Names are those of the operator's schema;
    ``operator.getitem`` has ``source`` and ``index``.

    Args:
        node: the call.
    """

    __slots__ = ("node",)

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __getattr__(self, name: str) -> Any:
        place = self.place(name)
        if place < len(self.node.args):
            return self.node.args[place]
        return self.node.kwargs.get(name, _defaults(self.node.target)[place])

    def place(self, name: str) -> int:
        """Returns the place of an argument.

        Raises:
            AttributeError: the operator has no argument of that name.
        """
        places = _places(self.node.target)
        if name not in places:
            raise AttributeError(f"{self.node.target} has no argument {name}; it has {', '.join(places)}")
        return places[name]

    @property
    def first(self) -> Any:
        """The first argument; None if there is none."""
        return next(iter(self.node.args), None)

    @property
    def names(self) -> Collection[str]:
        """Names of all arguments of the operator."""
        return _places(self.node.target)

    def gives(self, name: str) -> bool:
        """True if an argument differs from its default."""
        return bool(getattr(self, name) != _defaults(self.node.target)[self.place(name)])

    @property
    def given(self) -> set[str]:
        """Names of the arguments that differ from their defaults."""
        return {name for name in self.names if self.gives(name)}

    def arguments(self, given: Sequence[Any] | None = None, /, **changes: Any) -> tuple[Any, ...]:
        """Returns the arguments in their order, up to the last one that is given or changed.

        Args:
            given: the first arguments; None: those of the call.
            changes: new values by name.
        """
        places = {self.place(name): value for name, value in changes.items()}
        args = [*(self.node.args if given is None else given)]
        args += _defaults(self.node.target)[len(args) : max(places, default=-1) + 1]
        for place, value in places.items():
            args[place] = value
        return tuple(args)

    def replace(self, **changes: Any) -> None:
        """Changes arguments of the call."""
        self.node.args = self.arguments(**changes)
