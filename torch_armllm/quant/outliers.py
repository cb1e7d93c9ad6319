"""Layers whose round-trip error is out of line with their scheme: rounding hurt them more than it should."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import median

import torch

from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.schemes.registry import scheme_named

FACTOR = 2.0
"""A step twice as wide: a layer with so many times the error has lost one of its bits."""
HARMLESS = 0.05
"""No error below this stops anything: INT4 itself costs more."""
_ENOUGH = 5
"""Layers whose median says what is usual in a model."""


@cache
def gaussian_error(scheme: str) -> float:
    """The relative error of weights that are drawn from a normal distribution, in rows of 2048."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 2048, generator=generator)
    return scheme_named(scheme).quantize(weight)[1]


def expected_errors(records: Iterable[LayerRecord]) -> dict[str, float]:
    """What error each scheme of a model should leave in a layer.

    That of Gaussian weights, or the median of the model's own layers where they have more of it: a scheme
    with one scale a row leaves more in every layer of a model whose rows have heavy tails, and a calibrated
    method takes on more of this error for less of it in the outputs.
    """
    errors = defaultdict(list)
    for record in records:
        if record.error is not None:
            errors[record.scheme].append(record.error)
    return {
        scheme: max(gaussian_error(scheme), median(found) if len(found) >= _ENOUGH else 0.0)
        for scheme, found in errors.items()
    }


def find_outliers(records: Sequence[LayerRecord]) -> list[tuple[LayerRecord, float]]:
    """Layers with more than `FACTOR` times the expected error, worst first, each with what was expected."""
    expected = expected_errors(records)
    found = [
        (record, expected[record.scheme])
        for record in records
        if record.error is not None and record.error > max(FACTOR * expected[record.scheme], HARMLESS)
    ]
    return sorted(found, key=lambda pair: pair[0].error or 0.0, reverse=True)


def refuse_outliers(records: Sequence[LayerRecord], state: str = "nothing was changed") -> None:
    """Raises ValueError for layers whose errors are out of line; it names them and says what to do.

    Args:
        records: of a model's layers.
        state: what is the case when this stops the run.
    """
    found = find_outliers(records)
    if not found:
        return
    worst, expected = found[0]
    more = ", ".join(f"{record.name} ({record.error:.3f})" for record, _ in found[1:4])
    rest = f" and {len(found) - 4} more" if len(found) > 4 else ""
    remedy = f"ignore=[{worst.name!r}]"
    if worst.scheme != "int8":
        remedy = f'overrides={{{worst.name!r}: "int8"}} or {remedy}'
    raise ValueError(
        f"{worst.name} loses {worst.error:.3f} of its weights' norm as {worst.scheme}, where "
        f"{expected:.3f} is usual: {state}. Give it more bits or leave it, {remedy}, or accept this with "
        "allow_outliers=True" + (f". So do {more}{rest}" if more else "")
    )
