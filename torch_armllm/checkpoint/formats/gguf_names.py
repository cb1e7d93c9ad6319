"""Names of GGUF tensors in transformers' models."""

from __future__ import annotations

import re
from collections.abc import Iterable

_EXPERTS = re.compile(r".*\blayers\.(\d+)\..*experts\.(gate_up_proj|down_proj)(_bias)?")
_LAYER = re.compile(r".*\b(?:layers|h)\.(\d+)\.")
_BY_ENDING = {
    "linear_attn.dt_bias": "ssm_dt.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
}
"""Parameters that the ``gguf`` package does not name, by the ends of their names."""


def tensor_names(architecture: str, blocks: int, parameters: Iterable[str]) -> dict[str, str]:
    """Returns the model's parameter for each tensor that a file of it may have; experts' tensors are apart.

    Args:
        architecture: llama.cpp's name.
        blocks: number of blocks of the model.
        parameters: names of the model's parameters and buffers.

    Raises:
        ValueError: the ``gguf`` package does not know the architecture.
    """
    import gguf

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise ValueError(
            f"the installed gguf package does not know the architecture {architecture!r}: update it"
        )
    names = gguf.get_tensor_name_map(known[architecture], blocks)
    found: dict[str, str] = {}
    for parameter in parameters:
        if _EXPERTS.fullmatch(parameter):
            continue
        stem, dot, suffix = parameter.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = parameter, "", ""
        ending = next((own for end, own in _BY_ENDING.items() if parameter.endswith(end)), None)
        if ending is not None and (layer := _LAYER.match(parameter)):
            found[f"blk.{layer[1]}.{ending}"] = parameter
            continue
        name = _known_name(names, stem)
        if name is None:
            continue
        found[f"{name}{dot}{suffix}"] = parameter
        if not suffix:  # some converters write a suffix that transformers' name lacks
            found[f"{name}.weight"] = parameter
    return found


def _known_name(names: object, stem: str) -> str | None:
    """Returns the name of a module, whose files may lack the first part of its name in transformers."""
    while True:
        name: str | None = names.get_name(stem)  # type: ignore[attr-defined]
        if name is not None or "." not in stem:
            return name
        stem = stem.partition(".")[2]


def expert_parameters(parameters: Iterable[str]) -> dict[int, dict[str, str]]:
    """Returns each layer's parameters of experts: ``gate_up``, ``down``, ``gate_up_bias``, ``down_bias``."""
    found: dict[int, dict[str, str]] = {}
    for parameter in parameters:
        if match := _EXPERTS.fullmatch(parameter):
            part = match[2].removesuffix("_proj") + (match[3] or "")
            found.setdefault(int(match[1]), {})[part] = parameter
    return found
