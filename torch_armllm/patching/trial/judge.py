"""Comparison of what a model returns by its plan with what it returns by its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_armllm.patching.forwards.calls import Calls
from torch_armllm.patching.forwards.forward import PatchedForward

Results: TypeAlias = list[Tensor]
"""Groups of rows ``(rows, columns)``; most rows of each group have to agree."""


class Judge:
    """Judges ways of calling a model.

    Args:
        kind: name of the model's class.
        patched: its replaced forwards.
        bound: largest error of a row that is no fault.
    """

    def __init__(self, kind: str, patched: Sequence[PatchedForward[Calls]], bound: float) -> None:
        self._kind = kind
        self._patched = patched
        self._bound = bound

    @contextmanager
    def by_modules(self, really: bool = True) -> Iterator[None]:
        """Lets the modules compute all calls while the context lasts; ``really``: False for none."""
        with ExitStack() as stack:
            for each in self._patched if really else ():
                stack.enter_context(each.by_modules("a trial"))
            yield

    def fault(self, way: str, call: Callable[[], Results], expected: Results | None = None) -> str | None:
        """Returns what a way of calling does wrong; None for nothing, and for what the modules refuse too.

        Args:
            way: its name.
            call: computes the results.
            expected: results that are right; None, or where they differ: those of the same call by modules.
        """
        error: Exception | None = None
        try:
            found = call()
        except Exception as raised:  # noqa: BLE001 - whatever a user would get
            error = raised
        else:
            if expected is not None and not self.is_far(found, expected):
                return None
        try:
            with self.by_modules():
                own = call()
        except Exception:  # noqa: BLE001 - the model is not for such calls
            return None
        if error is not None:
            return f"{self._kind} raises {type(error).__name__} in {way} by its plan: {error}"
        if not self.is_far(found, own):
            return None
        return (
            f"{self._kind} computes something else in {way} by its plan than by its modules (relative error "
            f"{_difference(found, own):.2g})"
        )

    def is_far(self, found: Results, expected: Results) -> bool:
        """True if results differ by more than rounding explains."""
        return not _difference(found, expected) <= self._bound


def _difference(found: Results, expected: Results) -> float:
    """Returns the largest error of the groups: the median over the rows of each."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return float("inf")
    return max(map(_error, found, expected), default=0.0)


def _error(found: Tensor, expected: Tensor) -> float:
    """Returns the median of the rows' errors, the lower one of two: rounding may change one of them much."""
    norms = expected.norm(dim=-1).clamp(min=1e-30)
    errors = ((found - expected).norm(dim=-1) / norms).nan_to_num(nan=float("inf"))
    return float(errors.median())


def centered(logits: Tensor) -> Tensor:
    """Returns logits in float32 without what all of a token have in common, which says nothing.

    Tokens that a model excludes by the least number that there is get the least of the token's other logits.
    """
    least = torch.finfo(logits.dtype).min / 2
    excluded = logits <= least
    logits = logits.float()
    kept = logits.masked_fill(excluded, float("inf")).amin(-1, keepdim=True)
    logits = torch.where(excluded, kept, logits)
    return logits - logits.mean(-1, keepdim=True)


def tensors_of(output: Any) -> dict[str, Tensor]:
    """Returns the tensors in a model's output, by name, in float32."""
    return {name: value.float() for name, value in output.items() if isinstance(value, Tensor)}
