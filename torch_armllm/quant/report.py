"""The report of `patch` and `quantize`: scheme and error of each layer, or why it is unquantized."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch_armllm.system.dtypes import dtype_name
from torch_armllm.system.files import format_bytes
from torch_armllm.system.text_layout import labeled

_INDENT = 15

if TYPE_CHECKING:  # `quant.layers` imports transformers, which takes seconds
    from torch_armllm.quant.layers import Layer


@dataclass(frozen=True)
class LayerRecord:
    """One module that holds a weight matrix.

    Attributes:
        name: path of the module from the model's root.
        kind: ``linear``, ``latent`` (up-projection of latent attention), ``head``, ``experts``, ``router`` or
            ``other``.
        op: the op that computes it now, or ``torch`` if it is unquantized.
        scheme: scheme of its weight, or the dtype of an unquantized weight.
        parameters: number of weights.
        bytes_before, bytes_after: size of the weights.
        error: relative round-trip error ‖W − Ŵ‖ / ‖W‖, None if unquantized, or if another tool quantized it.
        reason: reason why it is unquantized; None if it is quantized.
    """

    name: str
    kind: str
    op: str
    scheme: str
    parameters: int
    bytes_before: int
    bytes_after: int
    error: float | None = None
    reason: str | None = None

    @classmethod
    def unquantized(cls, layer: Layer) -> LayerRecord:
        """Returns the record of a layer that keeps its float weights."""
        weights = layer.weights()
        size = sum(weight.nbytes for weight in weights)
        dtype = dtype_name(weights[0].dtype)
        count = sum(weight.numel() for weight in weights)
        return cls(layer.name, layer.kind, "torch", dtype, count, size, size, None, layer.reason)

    @property
    def quantized(self) -> bool:
        """True if the weight is stored as integers now."""
        return self.reason is None


@dataclass
class Report:
    """The result of patching or quantizing a model.

    Attributes:
        layers: a record for every module with a weight matrix, except embeddings.
        captured: True if the model's forward runs as a graph of fused ops.
        capture_reason: reason why it does not.
        variant: kernel variant in use, such as ``i8mm``; empty if no kernel is used.
        ops: number of calls of each op in a step.
        outliers: layers whose errors are out of line with their schemes, and the usual error.
        bytes_before, bytes_after: all parameters and buffers of the model.
        kv_bytes: bytes of keys and values, or latents, per token in the cache; 0 if not captured.
        kv_bytes_expanded: bytes of latents as expanded keys and values; None if the cache holds no latents.
        notes: further information for the user.
    """

    layers: list[LayerRecord] = field(default_factory=list)
    captured: bool = False
    capture_reason: str | None = None
    variant: str = ""
    ops: dict[str, int] = field(default_factory=dict)
    outliers: dict[str, float] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    kv_bytes: int = 0
    kv_bytes_expanded: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[LayerRecord]:
        """Layers whose weights are stored as integers now."""
        return [layer for layer in self.layers if layer.quantized]

    @property
    def left(self) -> list[LayerRecord]:
        """Layers that were not quantized, each with its reason."""
        return [layer for layer in self.layers if not layer.quantized]

    @property
    def share(self) -> float:
        """Share of the weight bytes that are quantized now, 0…1, without embeddings."""
        total = sum(layer.bytes_before for layer in self.layers)
        return sum(layer.bytes_before for layer in self.quantized) / total if total else 0.0

    def worst(self, count: int = 10) -> list[LayerRecord]:
        """Returns the quantized layers with the largest round-trip errors."""
        with_error = [layer for layer in self.quantized if layer.error is not None]
        ranked = sorted(with_error, key=lambda layer: layer.error or 0.0, reverse=True)
        return ranked[:count]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain JSON types."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        mode = (
            "whole forward"
            if self.captured
            else f"module by module ({self.capture_reason or 'not captured'})"
        )
        if self.variant:
            yield labeled("fused ops", f"{mode}; kernels: {self.variant}", _INDENT)
        if self.ops:
            calls = ", ".join(f"{op} x {count}" for op, count in sorted(self.ops.items()))
            yield labeled("a step calls", calls, _INDENT)
        if self.bytes_before:
            ratio = self.bytes_before / max(self.bytes_after, 1)
            sizes = f"{format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
            share = f"{100 * self.share:.1f} % of the weight bytes quantized"
            yield labeled("size", f"{sizes} ({ratio:.2f}x smaller); {share}", _INDENT)
        if self.kv_bytes:
            expanded = f" as latents ({self.kv_bytes_expanded} expanded)" if self.kv_bytes_expanded else ""
            yield labeled("KV cache", f"{self.kv_bytes} bytes a token{expanded}", _INDENT)
        yield from _table(self.layers)
        for index, layer in enumerate(self.worst()):
            usual = self.outliers.get(layer.name)
            warning = f"  out of line: {usual:.4f} is usual" if usual is not None else ""
            yield f"{'' if index else 'largest errors':<{_INDENT}}{layer.error:.4f}  {layer.name}{warning}"
        for (dtype, reason), names in _by_reason(self.left).items():
            yield labeled("left as it was", f"{dtype}: {reason}", _INDENT)
            yield from (f"{'':<{_INDENT}}{count:>4} x {name}" for name, count in _alike(names).items())
        for note in self.notes:
            yield labeled("note", note, _INDENT)


def _by_reason(layers: list[LayerRecord]) -> dict[tuple[str, str], list[str]]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        by_reason.setdefault((layer.scheme, layer.reason or ""), []).append(layer.name)
    return by_reason


def _alike(names: list[str]) -> dict[str, int]:
    """Counts names that differ only in their numbers."""
    return Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)


def _table(layers: list[LayerRecord]) -> Iterable[str]:
    """Yields a line for each kind, op and scheme, with counts, sizes and the mean error."""
    groups: dict[tuple[str, str, str], list[LayerRecord]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.op, layer.scheme), []).append(layer)
    if groups:
        names = f"{'layers':<8}{'count':>5}  {'op':<14}{'scheme':<10}"
        yield f"{names}{'weights':>10}{'before':>11}{'after':>11}{'error':>8}"
    for (kind, op, scheme), members in groups.items():
        errors = [layer.error for layer in members if layer.error is not None]
        mean = f"{sum(errors) / len(errors):8.4f}" if errors else f"{'-':>8}"
        weights = f"{sum(layer.parameters for layer in members) / 1e6:.2f} M"
        before, after = (
            format_bytes(sum(getattr(m, side) for m in members)) for side in ("bytes_before", "bytes_after")
        )
        yield f"{kind:<8}{len(members):>5}  {op:<14}{scheme:<10}{weights:>10}{before:>11}{after:>11}{mean}"
