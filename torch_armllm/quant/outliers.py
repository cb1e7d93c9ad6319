"""Outliers: layers whose round-trip error is far larger than usual for their scheme."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import median

import torch

from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.schemes.registry import DEFAULT, scheme_named

FACTOR = 2.0
"""Times the expected error; twice corresponds to a step twice as wide, so to the loss of one bit."""
HARMLESS = 0.05
"""Errors below this are never outliers: INT4 itself costs more."""
_MIN_LAYERS = 5
"""Fewest layers of a scheme whose median error counts as usual for the model."""


@cache
def gaussian_error(scheme: str) -> float:
    """Returns the relative error of normally distributed weights in rows of 2048."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 2048, generator=generator)
    return scheme_named(scheme).quantize(weight)[1]


def expected_errors(records: Iterable[LayerRecord]) -> dict[str, float]:
    """Returns the expected round-trip error of a layer, by scheme.

    It is the error of Gaussian weights, or the median of the model's own layers if that is larger.  It is
    larger for a scheme with one scale per row if rows have heavy tails, and for calibrated methods, which
    trade round-trip error for output error.
    """
    errors = defaultdict(list)
    for record in records:
        if record.error is not None:
            errors[record.scheme].append(record.error)
    return {
        scheme: max(gaussian_error(scheme), median(values) if len(values) >= _MIN_LAYERS else 0.0)
        for scheme, values in errors.items()
    }


def find_outliers(
    records: Sequence[LayerRecord], calibrated: bool = False
) -> list[tuple[LayerRecord, float]]:
    """Returns layers with more than `FACTOR` times the expected error and that expectation, worst first.

    A ``calibrated`` method moves weights on purpose, to make up for the errors of earlier layers, and does so
    whatever the scheme: its layers are outliers only beyond the limit of INT4.
    """
    expected = expected_errors(records)
    harmless = FACTOR * gaussian_error(DEFAULT) if calibrated else HARMLESS
    outliers = [
        (record, expected[record.scheme])
        for record in records
        if record.error is not None and record.error > max(FACTOR * expected[record.scheme], harmless)
    ]
    return sorted(outliers, key=lambda pair: pair[0].error or 0.0, reverse=True)


def refuse_outliers(records: Sequence[LayerRecord], state: str, calibrated: bool = False) -> None:
    """Raises ValueError for outliers; the message names them and the remedies.

    Args:
        records: records of a model's layers.
        state: the state that the error leaves, for the message.
        calibrated: see `find_outliers`.
    """
    outliers = find_outliers(records, calibrated)
    if not outliers:
        return
    worst, expected = outliers[0]
    more = ", ".join(f"{record.name} ({record.error:.3f})" for record, _ in outliers[1:4])
    others = f" and {len(outliers) - 4} more" if len(outliers) > 4 else ""
    remedy = f"ignore=[{worst.name!r}]"
    if worst.scheme != "int8":
        remedy = f'overrides={{{worst.name!r}: "int8"}} or {remedy}'
    raise ValueError(
        f"{worst.name} loses {worst.error:.3f} of its weights' norm as {worst.scheme}, where "
        f"{expected:.3f} is usual: {state}. Use more bits or skip the layer ({remedy}), or accept this with "
        "allow_outliers=True" + (f". Other outliers: {more}{others}" if more else "")
    )
