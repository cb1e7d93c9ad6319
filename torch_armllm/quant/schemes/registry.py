"""Registry of the weight quantization schemes: one handler for each scheme.

Every handler rounds to nearest.  Scales come from the absolute maximum or from a search for the least squared
error.  The caller passes rows in chunks, so temporary memory stays at a few megabytes for any matrix size.
"""

from __future__ import annotations

from torch_armllm.quant.schemes.base import Scheme
from torch_armllm.quant.schemes.float_scales import Asymmetric, Offset, Symmetric
from torch_armllm.quant.schemes.group_multipliers import G32I, G32IZ, Int3, Int6
from torch_armllm.quant.schemes.int8 import Int8, Int8Groups, Int8Offset

_HANDLERS: tuple[Scheme, ...] = (
    G32I(),
    G32IZ(),
    Symmetric("g32", 32),
    Symmetric("row", 0),
    Int8(),
    Int6(),
    Int3(),
    Symmetric("g64", 64),
    Symmetric("g128", 128),
    Asymmetric("rowz", 0),
    *(Asymmetric(f"g{span}z", span) for span in (32, 64, 128)),
    *(Symmetric(f"g{span}b", span, True) for span in (32, 64, 128)),
    *(Asymmetric(f"g{span}zb", span, True) for span in (32, 64, 128)),
    *(Offset(f"g{span}m", span) for span in (32, 64, 128)),
    *(Int8Groups(span) for span in (32, 64, 128)),
    *(Int8Offset(f"int8g{span}m", span) for span in (32, 64, 128)),
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
