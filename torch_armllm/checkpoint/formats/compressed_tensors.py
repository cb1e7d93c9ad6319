"""compressed-tensors, as llm-compressor writes them: 4-bit and 8-bit integers, packed or one per byte."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.bit_unpacking import centered, group_permutation, integer_weight, unpack
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight
from torch_armllm.checkpoint.formats.part_headers import PartHeaders
from torch_armllm.checkpoint.formats.settings import flag, group_count, integer, mapping
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

    def __init__(self, groups: Sequence[_Group]) -> None:
        super().__init__()
        self._groups = groups

    def renamed(self, name: str, names: Collection[str]) -> str:  # noqa: D102
        match = _JOINED.fullmatch(name)
        if match is None or f"{match[1]}_scale" not in names:
            return name
        return f"{match[1]}.weight{match[2] or ''}"

    def declared_shape(self, name: str, parts: PartHeaders) -> tuple[int, int]:  # noqa: D102
        settings = self._settings(name)
        per_word = 32 // settings.bits
        if "weight_packed" in parts:
            rows, words = parts.matrix("weight_packed", "I32", "U32")
            columns = words * per_word
            if "weight_shape" in parts:
                columns = _columns(parts.integers("weight_shape"), columns, per_word)
        else:
            rows, columns = parts.matrix("weight", "I8")
        groups = 1 if settings.strategy == "channel" else group_count(settings.group, columns)
        if settings.strategy != "tensor":
            parts.expect("weight_scale", (rows, groups))
        elif rows % max(1, math.prod(parts.shape("weight_scale"))):
            raise ValueError(f"{name}.weight_scale has {parts.shape('weight_scale')} values for {rows} rows")
        if "weight_zero_point" in parts:
            self._check_zeros(parts, settings, rows, groups)
        elif not settings.symmetric:
            raise ValueError(
                f"config_groups says that the weights are not symmetric, and {name}.weight_zero_point is "
                "missing: a file is missing or damaged"
            )
        if "weight_g_idx" in parts:
            parts.expect("weight_g_idx", (columns,), "I32", "I64")
        elif settings.ordered:
            raise ValueError(
                f"config_groups has actorder, and {name}.weight_g_idx is missing: a file is missing or "
                "damaged"
            )
        return rows, columns

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> IntegerWeight:  # noqa: D102
        settings = self._settings(name)
        bits = settings.bits
        packed = "weight_packed" in parts
        scales = parts["weight_scale"]
        if packed:
            q = unpack(parts["weight_packed"], bits, 1)
            if "weight_shape" in parts:  # of merged gate and up weights it has both shapes
                q = q[:, : _columns(parts["weight_shape"].flatten().tolist(), q.shape[1], 32 // bits)]
            q = centered(q, bits)
        else:
            q = parts["weight"]
        if q.dtype != torch.int8 or q.dim() != 2:
            raise ValueError(
                f"the weight is {q.dtype} of shape {tuple(q.shape)}, and int8 (N, K) can be read"
            )
        rows, columns = q.shape
        if settings.strategy == "tensor":
            scales = scales.reshape(-1, 1).repeat_interleave(
                rows // scales.numel(), 0
            )  # merged gate and up weights have one scale each
        group = settings.group
        zeros = self._zeros(parts, bits, rows, scales.shape[1])
        permutation = None
        groups = parts.get("weight_g_idx")
        if groups is not None and not bool((groups == -1).all()):  # -1: the columns have no order
            permutation = group_permutation(groups, columns, group)
            q = q if permutation is None else q.index_select(1, permutation)
        return integer_weight(q, scales, zeros, group, self.requantizer, permutation, bits)

    def _check_zeros(self, parts: PartHeaders, settings: _Group, rows: int, groups: int) -> None:
        packed = parts.is_of("weight_zero_point", "I32") and "weight_packed" in parts
        if settings.strategy == "tensor":
            parts.shape("weight_zero_point", "I8", "I32")
        elif packed:
            parts.expect("weight_zero_point", (-(-rows * settings.bits // 32), groups), "I32")
        else:
            parts.expect("weight_zero_point", (rows, groups), "I8")

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

    def _settings(self, name: str) -> _Group:
        """Returns the settings of a module's weights; a target of its name precedes one of its class."""
        for by_class in (False, True):
            for group in self._groups:
                if any(
                    _fits(target, one, by_class) for target in group.targets for one in _target_names(name)
                ):
                    return group
        raise ValueError(f"{name}: no entry of config_groups has it as a target")


@dataclass(frozen=True)
class _Group:
    """An entry of ``config_groups``.

    Attributes:
        targets: names, patterns or classes of modules.
        bits: 4 or 8.
        strategy: ``tensor``, ``channel`` or ``group``: what has a scale.
        group: columns of a group; −1 for a scale for all columns.
        symmetric: there are no zero points.
        ordered: the columns of a group lie apart, and a tensor says where.
    """

    targets: tuple[str, ...]
    bits: int
    strategy: str
    group: int
    symmetric: bool
    ordered: bool


def read(source: str, config: PreTrainedConfig, settings: dict[str, Any]) -> ThirdPartyCheckpoint:
    """Opens a checkpoint of compressed-tensors.

    Raises:
        ValueError: its weights are not 4-bit or 8-bit integers, are sparse, or need an activation transform.
    """
    groups = mapping(settings, "config_groups")
    if not groups:
        raise ValueError("quantization_config has no config_groups")
    found = [
        _group(f"config_groups[{title!r}]", mapping(groups, title), str(settings.get("format")))
        for title in groups
    ]
    sparsity = mapping(settings, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"its weights are sparse ({sparsity}); dense ones can be read")
    if mapping(settings, "transform_config").get("config_groups"):
        raise ValueError("it rotates activations as it runs (transform_config), for which there is no op")
    checkpoint = read_folder(source, config, "compressed-tensors", CompressedTensorsReader(found))
    checkpoint.notes += _notes(groups, settings)
    return checkpoint


def _group(title: str, group: Mapping[str, Any], form: str) -> _Group:
    weights, form = mapping(group, "weights"), group.get("format") or form
    if not weights:
        raise ValueError(f"{title} quantizes no weights")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind != "int" or isinstance(bits, bool) or bits not in (4, 8):
        raise ValueError(f"{title} has {kind}{bits} weights; int4 and int8 can be read")
    if form not in _FORMATS:
        raise ValueError(f"{title} has the format {form!r}; {', '.join(_FORMATS)} can be read")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise ValueError(f"{title} has a scale for each {strategy}; tensor, channel and group can be read")
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"targets of {title} are {targets!r}, and a list of names is expected")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"target {target!r} of {title} is no regular expression ({error})") from error
    size = -1
    if strategy == "group" and (size := integer(weights, "group_size", 0)) < 1:
        raise ValueError(f"group_size of {title} is {size}, and a positive number is expected")
    ordered = weights.get("actorder") in ("group", "dynamic", True)
    symmetric = flag(weights, "symmetric", True, nullable=False)  # null may stand for either
    return _Group(tuple(targets), int(bits), strategy, size, symmetric, ordered)


def _notes(groups: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Returns a note for each setting that is computed in another way."""
    notes = []
    inputs = [mapping(group, "input_activations") for group in groups.values()]
    if any(activations and not activations.get("dynamic") for activations in inputs):
        notes.append("activations have a scale for each token, not the static ones of the checkpoint")
    if any(activations.get("type") == "float" for activations in inputs):
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


def _columns(shape: Sequence[int], stored: int, per_word: int) -> int:
    """Returns the columns of a weight, the last size of its shape; the rest of the last word is padding."""
    columns = shape[-1] if shape else 0
    if not stored - per_word < columns <= stored:
        raise ValueError(
            f"weight_shape is {list(shape)}, and weight_packed has words for {stored} columns: the file is "
            "damaged"
        )
    return columns
