"""Checkpoints written by compressed-tensors' own compressors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import saved_folders
from tests.support.models import token_ids
from torch_armllm.checkpoint.load import load_model

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")
SIZES: dict[str, Any] = {"hidden_size": 128, "dtype": torch.bfloat16}


def scheme(bits: int, group: int | None, symmetric: bool, inputs: str | None) -> Any:
    weights = quantization.QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group,
    )
    activations = None
    if inputs is not None:
        activations = quantization.QuantizationArgs(
            num_bits=8,
            type="int",
            symmetric=True,
            strategy="token" if inputs == "dynamic" else "tensor",
            dynamic=inputs == "dynamic",
        )
    return quantization.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


def encoder(form: str, wanted: Any) -> saved_folders.Encode:
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    args = wanted.weights

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        qparams = quantization.utils.calculate_qparams(parts.amin(2), parts.amax(2), args)
        state = dict(zip(("weight_scale", "weight_zero_point"), qparams, strict=True), weight=weight)
        state["weight_zero_point"] = state["weight_zero_point"].to(torch.int8)
        written = compressor.compress(state, wanted)
        if wanted.input_activations is not None and not wanted.input_activations.dynamic:
            written["input_scale"] = torch.ones(1)
        return written, compressor.decompress(dict(written), wanted)["weight"]

    return encode


def settings(form: str, wanted: Any, **other: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": wanted.model_dump(mode="json")},
        "ignore": ["lm_head"],
        **other,
    }


@pytest.mark.parametrize(
    ("family", "form", "options", "packed"),
    [
        ("llama", "pack-quantized", (4, 32, True, None), "g32b"),
        ("llama", "pack-quantized", (4, 64, False, None), "g64zb"),
        ("llama", "pack-quantized", (4, None, True, None), "row"),
        ("llama", "int-quantized", (4, 32, True, "dynamic"), "g32b"),
        ("llama", "int-quantized", (8, None, True, "static"), "int8"),
        ("llama", "pack-quantized", (8, None, True, None), "int8"),
        ("llama", "int-quantized", (8, 32, True, None), "int8g32"),
        ("llama", "int-quantized", (8, None, False, "dynamic"), "int8g128m"),
        ("qwen3_moe", "pack-quantized", (4, 32, True, None), "g32b"),
        ("mixtral", "int-quantized", (8, None, True, "dynamic"), "int8"),
    ],
)
def test_integers_and_scales_are_kept(
    family: str,
    form: str,
    options: tuple[int, int | None, bool, str | None],
    packed: str,
    tmp_path: Path,
) -> None:
    wanted = scheme(*options)
    sizes = {**SIZES, "moe_intermediate_size" if "_moe" in family else "intermediate_size": 192}
    expected = saved_folders.write(tmp_path, family, encoder(form, wanted), settings(form, wanted), **sizes)
    report = saved_folders.check(tmp_path, expected).hf_quantizer.report
    assert {record.scheme for record in report.quantized if record.kind != "head"} == {packed}
    assert any("not the static ones" in note for note in report.notes) == (options[-1] == "static")


def test_groups_of_other_sizes_are_requantized_and_reported(tmp_path: Path) -> None:
    wanted = scheme(4, 16, False, None)
    written = settings("pack-quantized", wanted)
    encode = encoder("pack-quantized", wanted)
    expected = saved_folders.write(tmp_path, "qwen3_moe", encode, written, hidden_size=128)
    report = saved_folders.check(tmp_path, expected, error=0.008).hf_quantizer.report
    assert {record.scheme for record in report.quantized if record.kind != "head"} == {"int8g32"}
    assert any("groups of 16 were rounded to int8g32: relative error 0.00" in note for note in report.notes)


def test_scaled_embedding_keeps_its_scale(tmp_path: Path) -> None:
    """Gemma's embedding multiplies by a buffer that no file holds; its weight stays float."""
    wanted = scheme(4, 32, True, None)
    written = settings("pack-quantized", wanted)
    sizes = {"hidden_size": 128, "dtype": torch.float32}
    expected: Any = saved_folders.write(
        tmp_path, "gemma3_text", encoder("pack-quantized", wanted), written, **sizes
    )
    model: Any = load_model(str(tmp_path / "quantized"), dtype="auto")
    own, other = model.model.embed_tokens, expected.model.embed_tokens
    assert float(own.embed_scale) == float(other.embed_scale) > 11
    ids = token_ids(1, 5)
    with torch.no_grad():
        assert torch.equal(own(ids), other(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": {"num_bits": 2}}, "has int2 weights; int4 and int8 can be read"),
        ({"weights": {"type": "float", "num_bits": 8}}, "has float8 weights"),
        ({"weights": {"strategy": "block"}}, "a scale for each block"),
        ({"format": "marlin-24"}, "has the format 'marlin-24'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "weights are sparse"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "rotates activations"),
        ({"config_groups": {}}, "has no config_groups"),
        ({"targets": ["re:.*down_proj"]}, "no entry of config_groups has it as a target"),
        (
            {"weights": {"group_size": 64}},
            r"weight_scale in .* has the shape \(128, 3\), and \(128, 2\) is expected",
        ),
    ],
)
def test_unsupported_checkpoints_are_rejected_with_the_reason(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    wanted = scheme(4, 32, True, None)
    whole = settings("pack-quantized", wanted)
    group = whole["config_groups"]["group_0"]
    for name, value in change.items():
        if name == "weights":
            group["weights"].update(value)
        elif name == "targets":
            group[name] = value
        else:
            whole[name] = value
    saved_folders.write(tmp_path, "llama", encoder("pack-quantized", wanted), whole, hidden_size=128)
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path / "quantized"))
