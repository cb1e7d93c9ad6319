"""compressed-tensors, as llm-compressor writes them: 4-bit and 8-bit integers, packed or one per byte."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.bit_unpacking import centered, group_permutation, integer_weight, unpack
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight
from torch_armllm.checkpoint.formats.tensor_files import ModuleReader, read_folder
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint

_JOINED = re.compile(r"(.+\.(?:gate_up_proj|up_proj|down_proj))(_packed|_scale|_zero_point|_shape|_g_idx)?")
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


class CompressedTensorsReader(ModuleReader):
    """``weight_packed`` int32 (N, K/8 or K/4), or ``weight`` int8 (N, K), and ``weight_scale`` (N, S).

    ``weight_zero_point`` is packed along its rows if the weights are packed, else it has one per byte.  The
    tensors of all experts of a layer have a leading expert axis, and are named
    ``gate_up_proj.weight_packed`` or ``gate_up_proj_packed``.
    """

    marker = "weight_scale"
    parts = (
        "weight_packed",
        "weight",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
    )

    def __init__(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._groups = groups

    def renamed(self, name: str, names: Collection[str]) -> str:  # noqa: D102
        match = _JOINED.fullmatch(name)
        if match is None or f"{match[1]}_scale" not in names:
            return name
        return f"{match[1]}.weight{match[2] or ''}"

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> IntegerWeight:  # noqa: D102
        settings = self._settings(name)
        bits = int(settings["num_bits"])
        packed = "weight_packed" in parts
        scales = parts["weight_scale"]
        if packed:
            q = unpack(parts["weight_packed"], bits, 1)
            if "weight_shape" in parts:  # of merged gate and up weights it has both shapes
                q = q[:, : int(parts["weight_shape"].flatten()[-1])]
            q = centered(q, bits)
        else:
            q = parts["weight"]
        if q.dtype != torch.int8 or q.dim() != 2:
            raise ValueError(
                f"the weight is {q.dtype} of shape {tuple(q.shape)}, and int8 (N, K) can be read"
            )
        rows, columns = q.shape
        if settings["strategy"] == "tensor":
            scales = scales.reshape(-1, 1).repeat_interleave(
                rows // scales.numel(), 0
            )  # merged gate and up weights have one scale each
        group = int(settings.get("group_size") or -1) if settings["strategy"] == "group" else -1
        zeros = self._zeros(parts, bits, rows, scales.shape[1])
        permutation = None
        groups = parts.get("weight_g_idx")
        if groups is not None and bool((groups >= 0).all()):
            permutation = group_permutation(groups, columns, group)
            q = q if permutation is None else q.index_select(1, permutation)
        return integer_weight(q, scales, zeros, group, self.requantizer, permutation, bits)

    def _zeros(self, parts: Mapping[str, Tensor], bits: int, rows: int, count: int) -> Tensor | None:
        """Returns zero points int16 (N, S) for signed integers; None if all of them are 0."""
        stored = parts.get("weight_zero_point")
        if stored is None:
            return None
        if stored.dtype == torch.int32 and "weight_packed" in parts:
            zeros = unpack(stored, bits, 0)[:rows].to(torch.int16) - (1 << (bits - 1))
        else:
            zeros = stored.to(torch.int16).reshape(-1, count).expand(rows, count)
        return zeros if bool(zeros.any()) else None

    def _settings(self, name: str) -> Mapping[str, Any]:
        """Returns the settings of a module's weights; a target of its name precedes one of its class."""
        for by_class in (False, True):
            for group in self._groups.values():
                if any(
                    _fits(target, one, by_class) for target in group["targets"] for one in _target_names(name)
                ):
                    settings: Mapping[str, Any] = group["weights"]
                    return settings
        raise ValueError("no entry of config_groups has it as a target")


def read(source: str, config: PreTrainedConfig, settings: dict[str, Any]) -> ThirdPartyCheckpoint:
    """Opens a checkpoint of compressed-tensors.

    Raises:
        ValueError: its weights are not 4-bit or 8-bit integers, are sparse, or need an activation transform.
    """
    groups = settings.get("config_groups") or {}
    if not groups:
        raise ValueError("quantization_config has no config_groups")
    for title, group in groups.items():
        _check_group(title, group, str(settings.get("format")))
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"its weights are sparse ({sparsity}); dense ones can be read")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise ValueError("it rotates activations as it runs (transform_config), for which there is no op")
    checkpoint = read_folder(source, config, "compressed-tensors", CompressedTensorsReader(groups))
    checkpoint.notes += _notes(groups, settings)
    return checkpoint


def _check_group(title: str, group: Mapping[str, Any], form: str) -> None:
    weights, form = group.get("weights"), group.get("format") or form
    if weights is None:
        raise ValueError(f"config_groups[{title!r}] quantizes no weights")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind != "int" or bits not in (4, 8):
        raise ValueError(f"config_groups[{title!r}] has {kind}{bits} weights; int4 and int8 can be read")
    if form not in _FORMATS:
        raise ValueError(
            f"config_groups[{title!r}] has the format {form!r}; {', '.join(_FORMATS)} can be read"
        )
    if weights.get("strategy") not in ("tensor", "channel", "group"):
        raise ValueError(
            f"config_groups[{title!r}] has a scale for each {weights.get('strategy')}; tensor, channel and "
            "group can be read"
        )


def _notes(groups: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Returns a note for each setting that is computed in another way."""
    notes = []
    inputs = [group.get("input_activations") for group in groups.values()]
    if any(given is not None and not given.get("dynamic") for given in inputs):
        notes.append("activations have a scale for each token, not the static ones of the checkpoint")
    if any(given is not None and given.get("type") == "float" for given in inputs):
        notes.append("activations are rounded to INT8, not to the floats that the checkpoint asks for")
    if settings.get("kv_cache_scheme"):
        notes.append("the checkpoint's scales of keys and values are not used: see kv_cache")
    return notes


def _target_names(name: str) -> tuple[str, ...]:
    """Returns the names by which a target may match a module; merged experts also match as single ones."""
    head, _, last = name.rpartition(".")
    unmerged = f"{head}.0.{last.replace('gate_up', 'gate')}"
    return (name, unmerged) if head.endswith("experts") else (name,)


def _fits(target: str, name: str, by_class: bool) -> bool:
    if target.startswith("re:"):
        return not by_class and re.match(target.removeprefix("re:"), name) is not None
    if by_class:
        return "." not in target and target[:1].isupper()
    return name == target or name.endswith(f".{target}")
