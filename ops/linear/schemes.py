"""Weight schemes and their traits, as the compiled library defines them (``linear/schemes.def``)."""

from __future__ import annotations

from dataclasses import dataclass

from torch_armllm.ops.tables import ENUMS, SCHEME_ROWS

PANEL = 16
GROUP = 32
SCHEMES = ENUMS["Scheme"]
"""Every scheme and its number among the kernels."""


@dataclass(frozen=True)
class SchemeTraits:
    """Traits of a scheme.

    Attributes:
        bits: of a value.
        span: columns that share a float scale; 0 for one scale per row.
        bf16_scales: the float scales are bfloat16.
        offsets: each scale has a float offset: ``scale · q + offset``.
        multipliers: least and largest integer multiplier of a group of 32 columns; None if there are none.
        zero_points: least and largest zero point; None if there are none.
        computed_as: the scheme whose kernels multiply the weight.
    """

    bits: int
    span: int
    bf16_scales: bool
    offsets: bool
    multipliers: tuple[int, int] | None
    zero_points: tuple[int, int] | None
    computed_as: str

    @property
    def is_int8(self) -> bool:
        """True if the values are INT8."""
        return self.bits == 8

    @property
    def signed_multipliers(self) -> bool:
        """True if multipliers may be negative."""
        return self.multipliers is not None and self.multipliers[0] < 0

    @property
    def largest_multiplier(self) -> int:
        """Largest multiplier; 0 if there are none."""
        return self.multipliers[1] if self.multipliers else 0

    @property
    def has_narrow_zero_points(self) -> bool:
        """True if each group of 32 columns has a zero point of two bits."""
        return self.zero_points is not None and self.zero_points[0] > 0

    @property
    def has_wide_values(self) -> bool:
        """True if values have more bits than nibbles, and multipliers are stored in planes of bits."""
        return self.multipliers is not None and self.bits > 4

    @property
    def bias(self) -> int:
        """Number that is added to a value before it is stored, if it is not INT8."""
        return 0 if self.zero_points else 1 << self.bits - 1

    @property
    def values(self) -> tuple[int, int]:
        """Least and largest value."""
        return -self.bias, (1 << self.bits) - 1 - self.bias

    def stored_bits(self, columns: int) -> float:
        """Returns the bits per weight of the packed form, for rows of ``columns`` values."""
        span = self.span or columns
        bits = self.bits + (16 if self.bf16_scales else 32) / span + (32 / span if self.offsets else 0)
        if self.multipliers:
            bits += ((self.largest_multiplier - 1).bit_length() + self.signed_multipliers) / GROUP
        if self.zero_points:
            bits += 2 / GROUP if self.has_narrow_zero_points else 4 / span
        return bits


def _range(least: str, largest: str) -> tuple[int, int] | None:
    return (int(least), int(largest)) if int(largest) else None


TRAITS = {
    name: SchemeTraits(
        bits=int(bits),
        span=int(span),
        bf16_scales=scale_type == "bf16",
        offsets=offsets == "1",
        multipliers=_range(*ranges[:2]),
        zero_points=_range(*ranges[2:]),
        computed_as=computed_as,
    )
    for name, bits, span, scale_type, offsets, *ranges, computed_as in SCHEME_ROWS
}
"""Traits of every scheme by name."""
EXACT = tuple(name for name, traits in TRAITS.items() if not traits.span)
"""Schemes with integer sums over all of K: the same bits in every variant and batch."""


def traits_of(scheme: str) -> SchemeTraits:
    """Returns the traits of a scheme.

    Raises:
        ValueError: if the scheme is unknown.
    """
    if scheme not in TRAITS:
        raise ValueError(f"unknown scheme {scheme!r}; choose from: {', '.join(TRAITS)}")
    return TRAITS[scheme]


def same_in_any_batch(scheme: str) -> bool:
    """True if a row's bits do not depend on the number of rows: few and many rows add alike.

    ``int8`` is the name of scheme ``i8`` in recipes.
    """
    return scheme == "int8" or not traits_of(scheme).span or traits_of(scheme).is_int8
