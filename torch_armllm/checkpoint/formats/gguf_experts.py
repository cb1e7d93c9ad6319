"""Experts of GGUF files, stacked in a tensor for gates, one for ups and one for downs."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from torch_armllm.checkpoint.formats.expert_merging import arranged
from torch_armllm.checkpoint.formats.gguf_file import GgufFile
from torch_armllm.checkpoint.formats.gguf_names import expert_parameters
from torch_armllm.checkpoint.formats.gguf_weights import WeightReader
from torch_armllm.checkpoint.formats.integer_weight import LazyWeight
from torch_armllm.hf.expert_detection import is_experts, read_layout
from torch_armllm.hf.expert_layout import ExpertLayout

HALVES = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_COMMON: tuple[tuple[set[str | None], str | None], ...] = (
    ({None}, None),
    ({"g32"}, "g32"),
    ({"g32", "g32m"}, "g32m"),
    ({"int8g32"}, "int8g32"),
    ({"int8g32", "int8g32m"}, "int8g32m"),
)
"""Schemes of the experts' matrices, and the scheme that holds all of them exactly."""


class ExpertReader:
    """Merges the experts' tensors to the parameters of transformers' modules.

    Attributes:
        unread: tensors of experts that the model has no parameter for.
    """

    def __init__(self, file: GgufFile, model: PreTrainedModel, weights: WeightReader) -> None:
        self._file, self._weights = file, weights
        self._parameters = expert_parameters(model.state_dict())
        layouts = [read_layout(module) for _, module in model.named_modules() if is_experts(module)]
        self._layout = next((one for one in layouts if isinstance(one, ExpertLayout)), None)
        self._parts: dict[int, set[str]] = {}
        self.unread: list[str] = []
        for name in file.tensors:
            if match := HALVES.fullmatch(name):
                number = int(match[1])
                if number in self._parameters:
                    self._parts.setdefault(number, set()).add(f"{match[2]}.{match[3]}")
                elif not self._parameters or number <= max(self._parameters):
                    self.unread.append(name)

    def read(self) -> dict[str, LazyWeight]:
        """Returns the parameters of all layers by their names; a missing part leaves its parameter out."""
        weights: dict[str, LazyWeight] = {}
        for number, parts in self._parts.items():
            own = self._parameters[number]
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                halves = self._halves(parts, kind)
                inner, down = own.get(f"gate_up{suffix}"), own.get(f"down{suffix}")
                names = [f"blk.{number}.ffn_{half}_exps.{kind}" for half in (*halves, "down")]
                present = all(name in self._file.tensors for name in names)
                if inner is None or down is None or not halves or not present:
                    self.unread += [name for name in names if name in self._file.tensors]
                    continue
                self._merge(weights, names, inner, down, kind == "bias")
        return weights

    @staticmethod
    def _halves(parts: set[str], kind: str) -> tuple[str, ...]:
        if {f"gate.{kind}", f"up.{kind}"} <= parts:
            return ("gate", "up")
        return ("gate_up",) if f"gate_up.{kind}" in parts else ()

    def _merge(
        self, weights: dict[str, LazyWeight], names: list[str], inner: str, down: str, biases: bool
    ) -> None:
        scheme = None if biases else self._scheme(names)
        *halves, last = names

        def merged() -> Any:
            parts: Any = [self._weights.read(name, scheme) for name in halves]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            return arranged(whole, self._layout, joined=True)

        def single() -> Any:
            return arranged(self._weights.read(last, scheme), self._layout, joined=False)

        weights[inner], weights[down] = LazyWeight(merged), LazyWeight(single)

    def _scheme(self, names: list[str]) -> str | None:
        """Returns one scheme for gates, ups and downs, as the fused op requires."""
        schemes = {self._weights.scheme(name) for name in names}
        return next((wide for own, wide in _COMMON if schemes <= own), "g32m")
