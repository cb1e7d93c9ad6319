"""Rotary embeddings of GGUF files: header fields and tensors of factors, as transformers' rope parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_armllm.checkpoint.formats.gguf_file import GgufFile
from torch_armllm.checkpoint.formats.gguf_header import Header

FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that `apply_rope` reads."""
_NEVER = 1e20
"""Factors from here on stop a pair's rotation: llama.cpp writes 1e30."""
_CLOSE = 2e-5
"""Relative difference of factors that are the same: files hold them in float32."""
_USUAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of Llama 3.1 and later."""

Parameters = dict[str, Any]


def apply_rope(config: Any, header: Header, file: GgufFile) -> None:
    """Sets a configuration's ``rope_parameters`` as the file says.

    Raises:
        ValueError: transformers' model cannot rotate so.
    """
    ropes: Parameters | None = getattr(config, "rope_parameters", None)
    base, local = header.number("rope.freq_base"), header.number("rope.freq_base_swa")
    dimensions = header.integer("rope.dimension_count")
    header.skip("rope.scaling.finetuned", "rope.dimension_count_swa")
    if not isinstance(ropes, dict) or not ropes:
        _refuse(config, header, file)
        return
    inner = ropes.get("full_attention")
    rope = inner if isinstance(inner, dict) else ropes
    sliding = ropes.get("sliding_attention") if rope is inner else None
    if base is not None:
        rope["rope_theta"] = base
    if local is not None and isinstance(sliding, dict):
        sliding["rope_theta"] = local
    elif local is not None and local != rope.get("rope_theta"):
        raise header.unsupported("rope.freq_base_swa", local, config.model_type)
    rotated = _rotated(config, header, rope, dimensions)
    _sections(config, header, rope)
    scaling = _scaling(config, header)
    tensors = {name: file.floats(name).flatten().tolist() for name in TENSORS if name in file.tensors}
    for name, factors in tensors.items():
        if len(factors) != rotated // 2 or not all(math.isfinite(one) and one > 0 for one in factors):
            raise ValueError(
                f"{name} in {header.path} has {len(factors)} numbers, and {rotated // 2} above 0 are "
                "expected: the file is damaged"
            )
    if tensors and scaling.get("rope_type") not in (None, "longrope"):
        raise header.unsupported(
            "rope.scaling.type", scaling["rope_type"], f"{config.model_type} with factors"
        )
    if scaling or tensors:
        kept = {name: rope[name] for name in _KEPT if name in rope}
        rope.clear()
        rope.update(kept, rope_type="default")
        rope.update(scaling)
    if tensors:
        _factors(config, rope, tensors, rotated)
    elif rope.get("rope_type") == "longrope":
        raise ValueError(f"{header.path} has a longrope scaling, and no {LONG_FACTORS}: it is incomplete")


_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def _refuse(config: Any, header: Header, file: GgufFile) -> None:
    """Raises ValueError if a file scales rotations of a model that has none."""
    kind = header.value("rope.scaling.type")
    if kind not in (None, "none"):
        raise header.unsupported("rope.scaling.type", kind, config.model_type)
    for name in TENSORS:
        if name in file.tensors:
            raise ValueError(
                f"{header.path} holds {name}, and transformers' {config.model_type} rotates nothing"
            )


def _rotated(config: Any, header: Header, rope: Parameters, dimensions: int | None) -> int:
    """Returns the rotated dimensions of a head, and sets ``partial_rotary_factor``."""
    size = int(getattr(config, "global_head_dim", None) or _head_size(config))
    if dimensions is None:
        return int(size * float(rope.get("partial_rotary_factor") or 1.0))
    partial = "partial_rotary_factor" in rope or hasattr(config, "partial_rotary_factor")
    if rope.get("rope_type") == "proportional":
        if dimensions != size:
            raise header.unsupported("rope.dimension_count", dimensions, config.model_type)
    elif hasattr(config, "rotary_dim"):
        config.rotary_dim = dimensions
        if dimensions != size or partial:
            rope["partial_rotary_factor"] = dimensions / size
    elif partial:
        rope["partial_rotary_factor"] = dimensions / size
        if hasattr(config, "partial_rotary_factor"):
            config.partial_rotary_factor = dimensions / size
    elif dimensions != size:
        raise header.unsupported("rope.dimension_count", dimensions, config.model_type)
    return dimensions


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _sections(config: Any, header: Header, rope: Parameters) -> None:
    sections = header.value("rope.dimension_sections")
    if sections is None:
        return
    used = [one for one in (sections if isinstance(sections, list) else [sections]) if one]
    if used and list(rope.get("mrope_section") or ()) != used:
        raise header.unsupported("rope.dimension_sections", used, config.model_type)


def _scaling(config: Any, header: Header) -> Parameters:
    """Returns the rope parameters of the scaling fields; none if the file does not scale."""
    kind = header.value("rope.scaling.type")
    factor = header.number("rope.scaling.factor")
    legacy = header.number("rope.scale_linear")
    length = header.integer("rope.scaling.original_context_length")
    attention = header.number("rope.scaling.attn_factor")
    yarn = {name: header.number(f"rope.scaling.yarn_{name}") for name in _YARN}
    alpha = header.number("rope.scaling.alpha")
    multiplier = header.number("rope.scaling.yarn_log_multiplier")
    for name, value in (("rope.scaling.alpha", alpha), ("rope.scaling.yarn_log_multiplier", multiplier)):
        if value not in (None, 0.0):
            raise header.unsupported(name, value, config.model_type)
    if kind in (None, "linear") and (factor := factor or legacy) not in (None, 0.0, 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind in (None, "none", "linear"):
        return {}
    if kind == "longrope":
        return _longrope(config, header, length, attention)
    if kind != "yarn" or not factor:
        raise header.unsupported("rope.scaling.type", kind, config.model_type)
    if yarn["ext_factor"] not in (None, -1.0, 1.0):
        raise header.unsupported("rope.scaling.yarn_ext_factor", yarn["ext_factor"], config.model_type)
    scaling: Parameters = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = length or int(config.max_position_embeddings / factor)
    scaling.update({name: yarn[name] for name in ("beta_fast", "beta_slow") if yarn[name] is not None})
    share = (attention or 1.0) * (yarn["attn_factor"] or 1.0)
    if share != 1.0:
        scaling["attention_factor"] = share * (0.1 * math.log(factor) + 1.0)
    if config.model_type == "gpt_oss":  # its own, and no field of the file says so
        scaling["truncate"] = False
    return scaling


_YARN = ("ext_factor", "attn_factor", "beta_fast", "beta_slow")


def _longrope(config: Any, header: Header, length: int | None, attention: float | None) -> Parameters:
    if length is None:
        raise ValueError(
            f"{header.path} has a longrope scaling, and no rope.scaling.original_context_length: "
            "it is damaged"
        )
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = length
    scaling: Parameters = {"rope_type": "longrope", "original_max_position_embeddings": length}
    scaling["factor"] = config.max_position_embeddings / length
    return scaling if attention is None else scaling | {"attention_factor": attention}


def _factors(config: Any, rope: Parameters, tensors: Mapping[str, list[float]], rotated: int) -> None:
    """Sets the parameters by which transformers divides each frequency by the file's factor."""
    if LONG_FACTORS in tensors or SHORT_FACTORS in tensors:
        long = tensors.get(LONG_FACTORS) or tensors[SHORT_FACTORS]
        short = tensors.get(SHORT_FACTORS) or long
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        if rope["rope_type"] != "longrope":
            rope["attention_factor"] = 1.0
        rope.update(rope_type="longrope", long_factor=long, short_factor=short)
        return
    factors = tensors[FACTORS]
    if all(one == 1.0 for one in factors):
        return
    turning = sum(one < _NEVER for one in factors)
    if turning < len(factors) and all(one == 1.0 for one in factors[:turning]):
        rope.update(rope_type="proportional", partial_rotary_factor=turning / len(factors))
    elif (found := llama3_scaling(factors, float(rope["rope_theta"]), rotated)) is not None:
        rope.update(found)
    else:
        length = config.max_position_embeddings
        rope.update(rope_type="longrope", original_max_position_embeddings=length, attention_factor=1.0)
        rope.update(long_factor=factors, short_factor=factors)


def llama3_scaling(factors: Sequence[float], base: float, rotated: int) -> Parameters | None:
    """Returns the parameters of Llama 3's scaling that gives these factors; None if there are none.

    Between the wavelengths that stay and those that are divided by ``factor``, the inverse of a factor is a
    line in the frequency.  Two of them say which, but for a common factor of all lengths: the lower is 1.
    """
    given = torch.tensor(factors, dtype=torch.float64)
    cycles = base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated) / (2 * math.pi)
    factor = _rounded(float(given.max()), 1e-6)
    between = (given > 1 + _CLOSE) & (given < factor * (1 - _CLOSE))
    candidates = [_USUAL]
    if int(between.sum()) > 1 and factor > 1:
        smooth = (1 / given[between] - 1 / factor) / (1 - 1 / factor)
        x = cycles[between]
        slope = float((smooth[0] - smooth[-1]) / (x[0] - x[-1]))
        offset = float(slope * x[0] - smooth[0])
        if slope > 0 and offset > 0:
            length, high = slope / offset, 1 + 1 / offset
            candidates.append(
                {
                    "low_freq_factor": 1.0,
                    "high_freq_factor": _rounded(high, 1e-3),
                    "original_max_position_embeddings": round(length),
                }
            )
    for settings in candidates:
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        smooth = ((settings["original_max_position_embeddings"] * cycles - low) / (high - low)).clamp(0, 1)
        made = 1 / ((1 - smooth) / factor + smooth)
        if torch.allclose(made, given, rtol=_CLOSE, atol=0.0):
            return {"rope_type": "llama3", "factor": factor, **settings}
    return None


def _rounded(value: float, within: float) -> float:
    """Returns the whole number that a value is close to, else the value."""
    return float(round(value)) if abs(value - round(value)) < within * value else value
