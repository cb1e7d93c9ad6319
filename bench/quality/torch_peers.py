"""Peers that quantize a PyTorch model in memory: torchao and HQQ."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class TorchPeer:
    """A way to quantize a model.

    Attributes:
        name: of its row.
        series: of its row.
        apply: quantizes the layers of a float model in place, and returns bits per weight.
    """

    name: str
    series: str
    apply: Callable[[Any], float]


def torch_peers(text: str) -> list[TorchPeer]:
    """Returns the peers that an option names, separated by commas.

    Raises:
        ValueError: a name is unknown, or the peer's package is not installed.
    """
    names = [name for name in text.lower().split(",") if name]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"{name!r} is no peer; use some of {', '.join(PEERS)}")
        package = name.partition("-")[0]
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(f"{name} needs a package: pip install {package} ({error})") from error
    return [PEERS[name] for name in names]


def _torchao(algorithm: str) -> Callable[[Any], float]:
    """Returns a function that sets INT4 weights in groups of 32 and INT8 activations by token."""

    def apply(model: Any) -> float:
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

        layers = {id(layer) for layer in _layers(model)}
        config = Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,
            weight_granularity=PerGroup(32),
            weight_scale_dtype=torch.bfloat16,
            intx_choose_qparams_algorithm=algorithm,
        )
        quantize_(model, config, filter_fn=lambda module, _: id(module) in layers)
        weights = [layer.weight for layer in _layers(model)]
        scales = sum(16 * weight.scale.numel() for weight in weights)  # offsets are all zero
        return 4 + scales / sum(weight.qdata.numel() for weight in weights)

    return apply


def _hqq(model: Any) -> float:
    """Sets weights rounded by HQQ to 4 bits in groups of 64; activations stay float."""
    from hqq.core.quantize import Quantizer

    bits, total = 0, 0
    for layer in _layers(model):
        way = {"nbits": 4, "group_size": 64, "axis": 1, "device": "cpu", "compute_dtype": torch.float16}
        packed, meta = Quantizer.quantize(layer.weight.data, **way)
        meta["scale"], meta["zero"] = meta["scale"].half(), meta["zero"].half()
        layer.weight.data = Quantizer.dequantize(packed, meta).float()
        total += layer.weight.numel()
        bits += 4 * layer.weight.numel() + 16 * (meta["scale"].numel() + meta["zero"].numel())
    return bits / total


def _layers(model: Any) -> Iterator[nn.Linear]:
    """Yields the linear layers, without the output head."""
    return (module for module in model.base_model.modules() if isinstance(module, nn.Linear))


PEERS = {
    "torchao": TorchPeer("torchao, INT4 in groups of 32", "torchao", _torchao("affine")),
    "torchao-hqq": TorchPeer("torchao HQQ, INT4 in groups of 32", "torchao", _torchao("hqq_scale_only")),
    "hqq": TorchPeer("HQQ, groups of 64, floats", "HQQ, float activations", _hqq),
}
"""By the option's name: a package, and what is chosen in it."""
