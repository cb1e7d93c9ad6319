"""Error of each layer from rounding its activations to INT8 with one scale per token.

    python -m bench.activations --text FILE [--model smollm2] [--tokens 256] [--worst 6]

Runs the float model once on the first tokens of a text.  For every linear layer it measures the peak of a
token's inputs over their root mean square.  It also measures the relative error of the outputs with exact
weights, ‖(x̂ − x) Wᵀ‖ / ‖x Wᵀ‖ over all tokens, with one scale per token and with one scale per group of
64 inputs.  Prints the median over the model for each kind of layer, and the worst layers.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_armllm.checkpoint.load import load_model, load_tokenizer
from torch_armllm.quant.layers import find_layers, is_linear, weight_of


class Cost(NamedTuple):
    """Figures of one layer: median and largest peak over RMS of a token, and the two errors."""

    usual_peak: float
    largest_peak: float
    error: float
    grouped: float


def rounded(x: Tensor, group: int | None = None) -> Tensor:
    """Returns rows (T, K) rounded to INT8, with one scale per row or per ``group`` columns of a row."""
    parts = x.unflatten(1, (-1, group)) if group and x.shape[1] % group == 0 else x[:, None]
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (torch.round(parts / scale) * scale).view_as(x)


def cost(x: Tensor, weight: Tensor) -> Cost:
    """Returns the figures of inputs (T, K) to a weight (N, K)."""
    peaks = x.abs().amax(1) / x.square().mean(1).sqrt().clamp(min=1e-30)
    size = float((x @ weight.t()).norm())
    errors = [float(((rounded(x, group) - x) @ weight.t()).norm()) / size for group in (None, 64)]
    return Cost(float(peaks.median()), float(peaks.max()), *errors)


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> dict[str, Cost]:
    """Returns the figures of all linear layers but the head on tokens ``(1, T)``, by layer name."""
    costs: dict[str, Cost] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            costs[name] = cost(arguments[0].float().flatten(0, -2), weight_of(module).float())

        return hook

    hooks = [
        layer.module.register_forward_pre_hook(watch(layer.name))
        for layer in find_layers(model)
        if layer.kind == "linear" and is_linear(layer.module) and isinstance(layer.module, nn.Linear)
    ]
    model.base_model(input_ids=ids, use_cache=False)
    for handle in hooks:
        handle.remove()
    return costs


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--worst", type=int, default=6)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    text = options.text.read_text(encoding="utf-8")[: 16 * options.tokens]
    ids = torch.tensor([tokenizer(text).input_ids[: options.tokens]])
    costs = measure(load_model(options.model), ids)
    kinds: dict[str, list[Cost]] = defaultdict(list)
    for name, layer in costs.items():
        kinds[re.sub(r".*\.\d+\.", "", name)].append(layer)
    print(f"{'':<40}{'peak/RMS':>9}{'largest':>9}{'error':>9}{'by 64':>9}")
    for kind, layers in kinds.items():
        _line(
            f"{kind} (median of {len(layers)})",
            Cost(*(median(column) for column in zip(*layers, strict=True))),
        )
    for name, layer in sorted(costs.items(), key=lambda item: -item[1].error)[: options.worst]:
        _line(name, layer)


def _line(name: str, layer: Cost) -> None:
    print(
        f"{name:<40}{layer.usual_peak:>9.1f}{layer.largest_peak:>9.1f}{layer.error:>9.4f}{layer.grouped:>9.4f}"
    )


if __name__ == "__main__":
    main()
