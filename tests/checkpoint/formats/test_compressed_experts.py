"""Experts by compressed-tensors' compressors: separate or merged, in every kind of class."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoint.formats.test_compressed_tensors import encoder, scheme, settings
from tests.support import saved_folders
from tests.support.format_results import relative, with_rounded_inputs
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe, load
from torch_armllm.checkpoint.load import load_model
from torch_armllm.hf.expert_detection import is_experts, read_layout

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 192, "dtype": torch.bfloat16},
    "llama4_text": {"intermediate_size": 192},
    "gpt_oss": {"intermediate_size": 192},
    "qwen3_5_moe_text": {},
}


def write(folder: Path, family: str, form: str, wanted: Any, style: str) -> Any:
    """Writes a quantized folder with experts in a ``style``, and returns the equivalent float model.

    Styles: ``apart``; ``nested``, `gate_up_proj.weight_packed`; ``flat``, `gate_up_proj_packed`.
    """
    model: Any = tiny(family, hidden_size=128, **SIZES[family])
    model.save_pretrained(folder / "quantized")
    encode, expected, written = encoder(form, wanted), copy.deepcopy(model), {}
    experts = {name for name, module in model.named_modules() if is_experts(module)}
    for name, weight in model.state_dict().items():
        if name.rpartition(".")[0] in experts:
            continue
        if weight.dim() != 2 or any(
            part in name for part in (*saved_folders.UNQUANTIZED, "router", "shared_expert_gate")
        ):
            written[name] = weight
            continue
        parts, stands_for = encode(name, weight)
        expected.get_parameter(name).data.copy_(stands_for)
        written |= {name.removesuffix("weight") + part: one for part, one in parts.items()}
    for name in experts:
        written |= _experts(name, expected.get_submodule(name), encode, style)
    save_file(
        {name: one.clone().contiguous() for name, one in written.items()},
        folder / "quantized" / "model.safetensors",
    )
    saved_folders.configure(folder / "quantized", settings(form, wanted))
    expected.save_pretrained(folder / "float")
    return AutoModelForCausalLM.from_pretrained(folder / "float", dtype="auto")


def _experts(name: str, module: Any, encode: saved_folders.Encode, style: str) -> dict[str, Tensor]:
    """Returns the tensors of a layer's experts, and copies the equivalent floats to the module."""
    layout: Any = read_layout(module)
    inner, outer = (getattr(module, attribute).data for attribute in layout.weights)
    gates, ups = layout.inner(inner)
    halves = {"gate_proj": gates, "up_proj": ups, "down_proj": layout.outer(outer)}
    parts: dict[str, list[dict[str, Tensor]]] = {}
    for half, matrices in halves.items():
        for weight in matrices:
            tensors, stands_for = encode("experts", weight)
            weight.copy_(stands_for)  # a view of the module's
            parts.setdefault(half, []).append(tensors)
    if style == "apart":
        found = {
            f"{name}.{number}.{half}.{part}": one
            for half, experts in parts.items()
            for number, tensors in enumerate(experts)
            for part, one in tensors.items()
        }
        if layout.biased:
            inner_bias, outer_bias = layout.biases(module)
            biases = {"gate_proj": inner_bias[:, 0], "up_proj": inner_bias[:, 1], "down_proj": outer_bias}
            for half, rows in biases.items():
                found |= {f"{name}.{number}.{half}.bias": row for number, row in enumerate(rows)}
        return found
    stacks = {
        half: {part: torch.stack([own[part] for own in experts]) for part in experts[0]}
        for half, experts in parts.items()
    }
    gate, up = stacks["gate_proj"], stacks["up_proj"]
    joined = {part: torch.cat([gate[part], up[part]], 1) for part in gate}
    mark = (lambda part: f".{part}") if style == "nested" else (lambda part: part.removeprefix("weight"))
    return {
        f"{name}.{attribute}{mark(part)}": one
        for attribute, tensors in (("gate_up_proj", joined), ("down_proj", stacks["down_proj"]))
        for part, one in tensors.items()
    }


PACKED, PLAIN = "pack-quantized", "int-quantized"


@pytest.mark.parametrize(
    ("family", "form", "options", "style", "packed"),
    [
        ("qwen3_moe", PACKED, (4, 32, True, None), "nested", "g32b"),
        ("qwen3_moe", PACKED, (4, 64, False, None), "flat", "g64zb"),
        ("qwen3_moe", PACKED, (4, None, True, None), "nested", "row"),
        ("qwen3_moe", PLAIN, (8, None, True, "dynamic"), "flat", "int8"),
        ("qwen3_moe", PLAIN, (8, 32, True, "static"), "nested", "int8g32"),
        ("llama4_text", PACKED, (4, 64, True, None), "apart", "g64"),
        ("llama4_text", PACKED, (4, 32, False, None), "nested", "g32z"),
        ("gpt_oss", PACKED, (4, 32, True, None), "apart", "g32"),
        ("gpt_oss", PLAIN, (8, None, True, "dynamic"), "apart", "int8"),
    ],
)
def test_experts_keep_their_integers(
    family: str, form: str, options: Any, style: str, packed: str, tmp_path: Path
) -> None:
    expected = write(tmp_path, family, form, scheme(*options), style)
    kinds = {"nodes": family == "llama4_text", "fuse": family == "gpt_oss"}
    report = saved_folders.check(tmp_path, expected, **kinds).hf_quantizer.report
    assert {record.scheme for record in report.quantized if record.kind == "experts"} == {packed}


@torch.no_grad()
@pytest.mark.parametrize("style", ["apart", "flat"])
def test_language_model_of_a_multimodal_checkpoint_is_read(style: str, tmp_path: Path) -> None:
    """Qwen3.5's checkpoints have a multimodal configuration and parameter names."""
    expected = write(tmp_path, "qwen3_5_moe_text", PACKED, scheme(4, 32, True, None), style)
    folder = tmp_path / "quantized"
    text = json.loads((folder / "config.json").read_text())
    quantization = text.pop("quantization_config")
    AutoConfig.for_model("qwen3_5_moe", text_config=text).save_pretrained(folder)
    saved_folders.configure(folder, quantization)
    inside = "model.language_model."
    saved_folders.change(
        folder, lambda s: [s.update({n.replace("model.", inside, 1): s.pop(n)}) for n in list(s)]
    )
    model: Any = load(str(folder), Recipe(head=None), dtype=torch.float32)
    ids = token_ids(1, 6)
    assert relative(model(ids).logits, with_rounded_inputs(expected)(ids).logits) < 2e-3


def test_targets_of_single_experts_match_merged_experts(tmp_path: Path) -> None:
    wanted = scheme(4, 32, True, None)
    wanted.targets = [r"re:.*experts\.\d+\.(gate|up|down)_proj$", r"re:.*self_attn.*"]
    write(tmp_path, "qwen3_moe", PACKED, wanted, "nested")
    load_model(str(tmp_path / "quantized"))


def test_dequantized_experts_are_quantized_again(tmp_path: Path) -> None:
    write(tmp_path, "llama4_text", PACKED, scheme(4, 32, True, None), "nested")
    model: Any = load(str(tmp_path / "quantized"), "int8g32", requantize=True)
    [record, _] = [record for record in model.hf_quantizer.report.quantized if record.kind == "experts"]
    assert record.scheme == "int8g32" and record.error < 0.01


def test_unsupported_checkpoints_are_rejected_with_the_reason(tmp_path: Path) -> None:
    wanted = scheme(4, 32, True, None)
    write(tmp_path / "joined", "gpt_oss", PACKED, wanted, "nested")
    with pytest.raises(ValueError, match="gates and ups alternate in the model"):
        load_model(str(tmp_path / "joined" / "quantized"))
    write(tmp_path / "apart", "gpt_oss", PACKED, wanted, "apart")
    folder, name = tmp_path / "apart" / "quantized", "model.layers.0.mlp.experts"
    saved_folders.change(folder, lambda state: state.pop(f"{name}.2.up_proj.bias"))
    with pytest.raises(ValueError, match=rf"{name}.2.up_proj has no bias"):
        load_model(str(folder))
    write(tmp_path / "short", "qwen3_moe", PACKED, wanted, "nested")
    folder = tmp_path / "short" / "quantized"
    saved_folders.change(folder, lambda state: state.pop(f"{name}.gate_up_proj.weight_packed"))
    with pytest.raises(ValueError, match=f"{name}.gate_up_proj.weight is missing"):
        load_model(str(folder))
