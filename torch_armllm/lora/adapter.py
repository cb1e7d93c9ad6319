"""Adapters in PEFT's format on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+?)((?:\.base_layer)*)\.lora_(A|B)\.weight")
_EMBEDDING_FACTOR = re.compile(r"(.+)\.lora_embedding_(A|B)")
_OF_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)")
_PRODUCTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
"""Products of an expert by the names of its linear layers: gate, up and down."""
_COPY = re.compile(r"(.+)\.base_layer\.weight")
_UNSUPPORTED = {
    "use_dora": "DoRA rescales the base weight",
    "modules_to_save": "modules_to_save replaces whole modules",
    "fan_in_fan_out": "fan_in_fan_out transposes the base weight",
    "layer_replication": "layer_replication repeats layers",
    "trainable_token_indices": "trainable_token_indices replaces rows of the embedding",
    "alora_invocation_tokens": "an activated adapter begins within a prompt",
    "use_qalora": "QALoRA pools the input",
    "use_bdlora": "block-diagonal factors have other shapes",
    "lora_bias": "lora_bias adds a bias",
    "arrow_config": "a router chooses among several adapters",
    "kasa_config": "KaSA changes the base weight",
    "monteclora_config": "its factors are random variables",
    "velora_config": "VeLoRA changes the product",
}
"""Settings that an adapter must not have, and why."""

_REBASED = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Beginnings of the methods of initialization that subtract the first factors from the base weight."""


@dataclass(frozen=True)
class Adapter:
    """Low-rank factors by the names of the modules that they adapt.

    Attributes:
        factors: for each module A ``(r, in_features)`` and B ``(r, out_features)``, transposed and scaled.
        embeddings: those of the modules whose A has a column for each token.
        stacked: for each module of several experts the A ``(r · E, in)`` and B ``(out, r · E)`` of its
            parameters, as PEFT has them.
        copies: weights of the model itself that PEFT saves beside adapters of embeddings and heads, by the
            names of their modules.
        path: the folder.
        settings: those of the adapter.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    embeddings: frozenset[str]
    stacked: Mapping[str, list[tuple[Tensor, Tensor]]]
    copies: Mapping[str, Tensor]
    path: Path
    settings: Mapping[str, Any]

    def rank_of(self, name: str) -> int:
        """Returns the rank of a parameter's factors; ValueError if the settings have none."""
        return _rank_and_scale(self.path, name, self.settings)[0]

    def scaled(self, name: str, b: Tensor) -> Tensor:
        """Returns the second factors of a parameter as float32, multiplied by what the settings say."""
        scaled = b.float() * _rank_and_scale(self.path, name, self.settings)[1]
        _check_finite(self.path, name, "B", scaled)
        return scaled


def read_adapter(folder: str | Path) -> Adapter:
    """Reads an adapter.

    Raises:
        ValueError: a file is missing or damaged, or the adapter has parts that are not supported; the message
            names them.
    """
    path = Path(folder).expanduser()
    config = _config(path)
    tensors = _tensors(path)
    parts: dict[str, dict[str, Tensor]] = {}
    layers: dict[str, dict[str, dict[str, Tensor]]] = {}
    copies: dict[str, Tensor] = {}
    embeddings: set[str] = set()
    for name, tensor in tensors.items():
        copy = _COPY.fullmatch(name.removeprefix(_PREFIX))
        if copy is not None:
            copies[copy[1]] = tensor
            continue
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is not None and (match[2] or _is_stacked(match[1], config)):
            layers.setdefault(match[1], {}).setdefault(match[2], {})[match[3]] = tensor
            continue
        if match is not None:
            parts.setdefault(match[1], {})[match[3]] = tensor
            continue
        match = _EMBEDDING_FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ValueError(f"{path / WEIGHTS} has the tensor {name!r}: only lora_A and lora_B of linear "
                             "layers and of an embedding are supported")  # fmt: skip
        parts.setdefault(match[1], {})[match[2]] = tensor
        embeddings.add(match[1])
    if not parts and not layers:
        raise ValueError(f"{path / WEIGHTS} adapts no module")
    factors = {module: _factors(path, module, pair, config) for module, pair in parts.items()}
    for module in copies.keys() - factors.keys():
        raise ValueError(f"{path / WEIGHTS} has the weight of {module}, which the adapter does not adapt")
    stacked = {
        module: [_checked(path, module, pair) for pair in pairs.values()] for module, pairs in layers.items()
    }
    return Adapter(factors, frozenset(embeddings), stacked, copies, path, config)


def expert_layer(name: str) -> tuple[str, int, int] | None:
    """Returns the experts that a linear layer may be of, its expert and its product; None for others.

    Adapters that are older than transformers' stacked experts have such names.  Products are 0 for the gate,
    1 for up and 2 for down.
    """
    match = _OF_EXPERT.fullmatch(name)
    if match is None or match[3] not in _PRODUCTS:
        return None
    return match[1].replace(".block_sparse_moe.", ".mlp."), int(match[2]), _PRODUCTS[match[3]]


def _is_stacked(module: str, config: Mapping[str, Any]) -> bool:
    """True if an adapter adapts parameters of a module other than its weight: those of experts."""
    names = (str(name).rpartition(".") for name in config.get("target_parameters") or ())
    return any(last != "weight" and f".{module}".endswith(f".{first}") for first, _, last in names)


def _config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"the adapter {path} cannot be read: {error.strerror or error} ({CONFIG}); give the folder that "
            "PEFT's save_pretrained wrote"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"{file} is of type {kind!r}; only LORA is supported")
    for name, reason in _UNSUPPORTED.items():
        if config.get(name):
            raise ValueError(f"{file} sets {name} = {config[name]!r}: {reason}, which is not supported")
    if (start := str(config.get("init_lora_weights")).lower()).startswith(_REBASED):
        raise ValueError(
            f"{file} sets init_lora_weights = {start!r}, which changed the base weight too; convert it with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise ValueError(f"{file} sets {name} = {config[name]!r}; it must be an object")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{file} sets bias = {config['bias']!r}: only adapters without biases are supported")
    return config


def _tensors(path: Path) -> dict[str, Tensor]:
    file = path / WEIGHTS
    if not file.is_file():
        raise ValueError(f"the adapter {path} has no file {WEIGHTS}: save it with safe_serialization=True")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _factors(
    path: Path, module: str, pair: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    a, b = _checked(path, module, pair)
    rank, scale = _rank_and_scale(path, module, config)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ValueError(
            f"{path}: {module} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} at rank {rank}; they "
            f"must be ({rank}, in_features) and (out_features, {rank})"
        )
    b = (b.float() * scale).T.contiguous()
    _check_finite(path, module, "B", b)
    return a.float(), b


def _check_finite(path: Path, module: str, name: str, factor: Tensor) -> None:
    if not bool(torch.isfinite(factor).all()):
        raise ValueError(f"{path}: lora_{name} of {module} has values that are not finite")


def _checked(path: Path, module: str, pair: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns both factors, which are finite matrices of floats."""
    if len(pair) != 2:
        raise ValueError(f"{path}: {module} has lora_{next(iter(pair))} alone; the other factor is missing")
    a, b = pair["A"], pair["B"]
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(
            f"{path}: {module} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}; both must be matrices"
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(f"{path}: {module} has factors of {a.dtype} and {b.dtype}; they must be floats")
    for name, factor in (("A", a), ("B", b)):
        _check_finite(path, module, name, factor)
    return a, b


def _rank_and_scale(path: Path, module: str, config: Mapping[str, Any]) -> tuple[int, float]:
    """Returns the rank of a module's factors, and what multiplies their product."""
    rank = _of_module(config, "rank_pattern", module, config.get("r"))
    alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"{path}: {module} has the rank {rank!r}; it must be an integer above 0")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ValueError(f"{path}: {module} has lora_alpha = {alpha!r}; it must be a number")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _of_module(config: Mapping[str, Any], patterns: str, module: str, default: Any) -> Any:
    """Returns a module's value: that of the first pattern that its name ends with, as PEFT has it."""
    for pattern, value in (config.get(patterns) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ValueError(f"{patterns} has the pattern {pattern!r}: {error}") from error
    return default
