"""Experts of a restored plan that stay in the checkpoint's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.llm.plan_cache.tensor_files import TensorLocation, tensor_locations
from torch_armllm.plan.expert_layers import ExpertLayer, expert_layers
from torch_armllm.plan.expert_store import ExpertStore, StoredWeight, stored_bytes
from torch_armllm.plan.placed_program import PlacedProgram


@dataclass(frozen=True)
class DiskExperts:
    """Layers whose experts may stay in files.

    Attributes:
        layers: by the names of their weights in the files: gate and up, and down.
        changed: all layers of the program that use these weights.
        locations: of the weights.
    """

    layers: tuple[tuple[str, str], ...]
    changed: tuple[ExpertLayer, ...]
    locations: Mapping[str, TensorLocation]

    @property
    def names(self) -> set[str]:
        """Names of the weights in the files."""
        return {name for layer in self.layers for name in layer}

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(self.locations[name].nbytes for name in self.names)

    def layer_bytes(self) -> list[int]:
        """Returns the bytes that all experts of each layer take in memory."""
        shapes = [[self.locations[name].shape for name in layer] for layer in self.layers]
        return [sum(n * stored_bytes(*panels) for n, *panels in layer) for layer in shapes]

    def open(self, budget: int, weights: Mapping[str, Tensor]) -> ExpertStore:
        """Opens the store of these experts.

        Args:
            budget: bytes that they may take.
            weights: by name, reserved memory of `torch_armllm.plan.expert_store.reserve`.

        Raises:
            RuntimeError: a file cannot be opened.
        """
        stored = {
            name: StoredWeight(weights[name], place.file, place.begin)
            for name, place in self.locations.items()
        }
        return ExpertStore(budget, [(stored[first], stored[second]) for first, second in self.layers])


def disk_experts(
    program: PlacedProgram, sources: Sequence[Mapping[str, Any]], folder: Path
) -> DiskExperts | None:
    """Finds the layers whose experts may stay in files: their weights are there as kernels read them.

    Args:
        program: the plan's.
        sources: of its constants and of others; see `torch_armllm.llm.plan_cache.constants.describe`.
        folder: of the files.

    Returns:
        None if there are none.
    """
    files = tensor_locations(folder)
    layers = expert_layers(program)
    pairs = {layer: tuple(_whole(sources[i], files) for i in layer) for layer in layers}
    used = Counter(name for pair in set(pairs.values()) for name in pair)
    indices = {i for layer in layers for i in layer}
    others = {source.get("name") for i, source in enumerate(sources) if i not in indices}
    fitting = {
        layer: (first, second)
        for layer, (first, second) in pairs.items()
        if first and second and used[first] == used[second] == 1 and not {first, second} & others
    }
    if not fitting:
        return None
    names = tuple(dict.fromkeys(fitting.values()))
    return DiskExperts(names, tuple(fitting), {name: files[name] for pair in names for name in pair})


def _whole(source: Mapping[str, Any], files: Mapping[str, TensorLocation]) -> str | None:
    """Returns the name of a file's tensor if the source is all of it, as stacked packed weights."""
    name = source.get("name")
    if name is None or files[name].dtype != torch.uint8 or len(files[name].shape) != 3:
        return None
    _, panels, panel_bytes = shape = files[name].shape
    stride = [panels * panel_bytes, panel_bytes, 1]
    whole = source["shape"] == list(shape) and source["stride"] == stride and source["offset"] == 0
    return name if whole else None
