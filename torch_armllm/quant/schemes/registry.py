"""Registry of the weight quantization schemes: one handler for each scheme.

Every handler rounds to nearest.  Scales come from the absolute maximum or from a search for the least squared
error.  The caller passes rows in chunks, so temporary memory stays at a few megabytes for any matrix size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_armllm.quant.schemes.base import Scheme
from torch_armllm.quant.schemes.float_scales import Asymmetric, Offset, Symmetric
from torch_armllm.quant.schemes.group_multipliers import Multiplied, MultipliedWithZeros, Unclipped
from torch_armllm.quant.schemes.int8 import Int8, Int8Offset


def _by_span(kind: Callable[[str], Scheme], name: str) -> tuple[Scheme, ...]:
    """Returns a scheme for each span, which takes the place of ``#`` in the name."""
    return tuple(kind(name.replace("#", span)) for span in ("32", "64", "128"))


_HANDLERS: tuple[Scheme, ...] = (
    Multiplied("g32i", clipped=5),
    MultipliedWithZeros("g32iz", clipped=3),
    Symmetric("g32"),
    Symmetric("row"),
    Int8("int8"),
    Unclipped("int6"),
    Multiplied("int5", clipped=1),
    Multiplied("int3", clipped=7),
    Symmetric("g64"),
    Symmetric("g128"),
    Asymmetric("rowz"),
    *_by_span(Asymmetric, "g#z"),
    *_by_span(Symmetric, "g#b"),
    *_by_span(Asymmetric, "g#zb"),
    *_by_span(Offset, "g#m"),
    *_by_span(Int8, "int8g#"),
    *_by_span(Int8Offset, "int8g#m"),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _HANDLERS}
DEFAULT = "g32iz"
"""The scheme that ``int4`` names."""
FORMER_DEFAULTS = ("g32i",)
"""Schemes that ``int4`` named before: a saved model that has one stays as it is."""


def scheme_named(name: str) -> Scheme:
    """Returns the handler of a scheme; ``int4`` names the default scheme.

    Raises:
        ValueError: no scheme has this name.
    """
    name = DEFAULT if name == "int4" else name
    if not isinstance(name, str) or name not in SCHEMES:
        raise ValueError(f"unknown quantization scheme {name!r}; there are {', '.join(SCHEMES)}")
    return SCHEMES[name]
