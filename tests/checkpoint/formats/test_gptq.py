"""Checkpoints in the layouts of AutoGPTQ and GPTQModel."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.support import saved_folders
from tests.support.models import token_ids
from torch_armllm import LLM, Recipe, SamplingParams


def pack(values: Tensor, axis: int, bits: int = 4) -> Tensor:
    """Packs unsigned integers into int32 along an axis, the first in the lowest bits."""
    count = 32 // bits
    lanes = values.long().unflatten(axis, (-1, count))
    word = sum(lanes.select(axis + 1, place) << (bits * place) for place in range(count))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def encoder(group: int, symmetric: bool, version: int, ordered: bool, bits: int = 4) -> saved_folders.Encode:
    middle = 1 << (bits - 1)

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = torch.arange(columns)
        if ordered and "down_proj" not in name:  # layers with the same input share its permutation
            shared = zlib.crc32(re.sub("[qkv]_proj|gate_proj|up_proj", "", name).encode())
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(shared))
        parts = weight[:, order].unflatten(1, (-1, size))
        if symmetric:
            scales = (parts.abs().amax(2) / (middle - 1)).half()
            zeros = torch.full_like(scales, middle).float()
        else:
            low, high = parts.amin(2), parts.amax(2)
            scales = ((high - low) / 15).half()
            zeros = (-low / scales.float()).round().clamp(1, 15)
        q = (parts / scales.float()[..., None]).round().add(zeros[..., None]).clamp(0, 2 * middle - 1)
        stands_for = torch.empty_like(weight)
        stands_for[:, order] = ((q - zeros[..., None]) * scales.float()[..., None]).flatten(1)
        inputs = torch.empty_like(weight)
        inputs[:, order] = q.flatten(1)
        groups = torch.empty(columns, dtype=torch.int32)
        groups[order] = (torch.arange(columns) // size).int()
        return {
            "qweight": pack(inputs.t(), 0, bits),
            "qzeros": pack((zeros - float(version == 1)).t(), 1, bits),
            "scales": scales.t(),
            "g_idx": groups,
        }, stands_for

    return encode


def settings(group: int, symmetric: bool, version: int, ordered: bool, bits: int = 4) -> dict[str, object]:
    form = {1: "gptq", 2: "gptq_v2"}[version]
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": form,
    }


def write(folder: Path, family: str, options: Any, change: Any = None, **sizes: Any) -> Any:
    """Writes a quantized folder, and returns the equivalent float model; ``change``: of the settings."""
    return saved_folders.write(
        folder, family, encoder(*options), {**settings(*options), **(change or {})}, **sizes
    )


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", (32, True, 1, False)),
        ("llama", (64, False, 2, False)),
        ("qwen3_moe", (-1, False, 1, False)),
        ("llama", (-1, True, 1, False, 8)),
        ("llama", (32, True, 2, False, 8)),
    ],
)
def test_integers_and_scales_are_kept(family: str, options: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size" if "moe" in family else "intermediate_size": 192}
    saved_folders.check(tmp_path, write(tmp_path, family, options, **sizes))


@torch.no_grad()
def test_inputs_are_permuted_by_group(tmp_path: Path) -> None:
    expected = write(tmp_path, "llama", (32, False, 1, True), hidden_size=128)
    model = saved_folders.check(tmp_path, expected)
    ops = model.hf_quantizer.report.ops
    assert (
        ops["int4_linear"] == 3 * 2 and ops["int4_gated_linear"] == 2
    )  # layers that share their input are merged
    logits = model(token_ids(2, 9)).logits
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(token_ids(2, 9)).logits, logits)
    assert again.config.quantization_config.source == "gptq"
    torch_armllm.unpatch(again)
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, expected.model.layers[0].mlp.up_proj.weight)


def test_experts_with_act_order_are_requantized_and_reported(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 192}
    expected = write(tmp_path, "qwen3_moe", (32, False, 1, True), **sizes)
    report = saved_folders.check(tmp_path, expected, tolerance=0.2, error=0.008).hf_quantizer.report
    assert {record.scheme for record in report.quantized if record.kind == "experts"} == {"int8g32"}
    assert {record.scheme for record in report.quantized if record.kind == "linear"} == {"g32z"}
    assert any("experts with desc_act were rounded to int8g32" in note for note in report.notes)


@torch.no_grad()
def test_every_api_loads_the_checkpoint(tmp_path: Path) -> None:
    expected = write(tmp_path, "llama", (32, True, 2, False), hidden_size=128)
    folder = str(tmp_path / "quantized")
    model = torch_armllm.load(folder, Recipe(head=None, ignore=["*.down_proj"]), fuse=False)
    assert type(model.lm_head) is torch.nn.Linear
    down = model.model.layers[1].mlp.down_proj
    assert torch.equal(down.weight, expected.model.layers[1].mlp.down_proj.weight)
    with pytest.raises(ValueError, match="packed as gptq stored them; to use 'row'"):
        torch_armllm.patch(model, "row")
    report = torch_armllm.patch(model)
    assert {record.scheme for record in report.quantized} == {"g32"}
    assert all(record.error is None for record in report.quantized)
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, progress=False)
    [answer] = llm.generate(
        {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False
    )
    assert len(answer.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "weights of 3 bits: GPTQ of 4 and 8 bits can be read"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin': gptq and gptq_v2"),
        (
            {"group_size": 36},
            "scales in .* has the shape|group_size is 36, and -1, a power of two or a divisor of the",
        ),
        (
            {"quant_method": "aqlm"},
            "is quantized by 'aqlm', which has no reader: there are readers for awq, comp",
        ),
    ],
)
def test_unsupported_settings_are_rejected(change: dict[str, object], message: str, tmp_path: Path) -> None:
    write(tmp_path, "llama", (32, True, 1, False), change)
    with pytest.raises(ValueError, match=message):
        torch_armllm.load(str(tmp_path / "quantized"))


DYNAMIC = {
    r"+:.*\.0\..*(gate|up)_proj": {"bits": 8, "group_size": 64, "mse": 2.4},
    r".*\.1\..*down_proj": {"sym": False, "desc_act": True},
    r"-:.*\.1\..*o_proj": {},
    r"+:.*o_proj": {"group_size": -1},
}
"""Settings of some modules, as GPTQModel writes them: the first pattern that matches holds."""


def dynamic_options(name: str) -> Any:
    """Returns the options with which `encoder` writes a module; None if the module is not quantized."""
    if ".0." in name and ("gate_proj" in name or "up_proj" in name):
        return (64, True, 1, False, 8)
    if ".1." in name and "down_proj" in name:
        return (32, False, 1, False)
    if "o_proj" in name:
        return None if ".1." in name else (-1, True, 1, False)
    return (32, True, 1, False)


def write_dynamic(folder: Path, dynamic: dict[str, Any]) -> Any:
    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        options = dynamic_options(name)
        return ({"weight": weight}, weight) if options is None else encoder(*options)(name, weight)

    whole = {**settings(32, True, 1, False), "dynamic": dynamic}
    return saved_folders.write(folder, "llama", encode, whole, hidden_size=128, intermediate_size=192)


def test_modules_with_settings_of_their_own(tmp_path: Path) -> None:
    expected = write_dynamic(tmp_path, DYNAMIC)
    model: Any = torch_armllm.load(str(tmp_path / "quantized"), Recipe(head=None), dtype=torch.float32)
    layers = model.model.layers
    assert (layers[0].mlp.up_proj.scheme, layers[1].mlp.up_proj.scheme) == ("int8g64", "g32")
    assert (layers[0].mlp.down_proj.scheme, layers[1].mlp.down_proj.scheme) == ("g32", "g32z")
    assert layers[0].self_attn.o_proj.scheme == "row"
    assert type(layers[1].self_attn.o_proj) is torch.nn.Linear
    ids = token_ids(1, 9)
    with torch.no_grad():
        assert float((model(ids).logits - expected(ids).logits).norm() / expected(ids).logits.norm()) < 0.05


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({r"+:.*gate_proj": {"bits": 3}}, r"model.layers.*gate_proj: weights of 3 bits"),
        (
            {r"-:.*gate_proj": {}},
            r"gate_proj is quantized, and '-:.\*gate_proj' of dynamic says that it is not",
        ),
        ({r"+:.*up_proj": {"pack_dtype": "int8"}}, r"'\+:.\*up_proj' sets pack_dtype, and bits, "),
        ({r"+:(": {"bits": 4}}, r"'\+:\(' is no regular expression"),
        ([".*"], "dynamic is .* and an object is expected"),
        ({".*": 4}, "is 4, and an object is expected"),
    ],
)
def test_dynamic_settings_that_cannot_be_read(dynamic: Any, message: str, tmp_path: Path) -> None:
    write_dynamic(tmp_path, dynamic)
    with pytest.raises(ValueError, match=message):
        torch_armllm.load(str(tmp_path / "quantized"))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "llama", (32, True, 1, False))
    folder, name = tmp_path / "quantized", "model.layers.1.mlp.up_proj"
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    edits: list[tuple[Any, str]] = [
        (lambda state: state.pop(f"{name}.scales"), f"{name}.scales is missing"),
        (lambda state: state.pop(f"{name}.qweight"), f"{name}.g_idx, which looks like a part of a weight"),
        (lambda state: state.update({f"{name}.qweight": state[f"{name}.qweight"][:-4].clone()}), name),
        (
            lambda state: state[f"{name}.scales"].fill_(float("nan")),
            f"{name}: a scale is NaN, infinite or above",
        ),
        (
            lambda state: state[f"{name}.g_idx"].fill_(0),
            f"{name}: g_idx does not give every group 32",
        ),
    ]
    for edit, message in edits:
        file.write_bytes(whole)
        saved_folders.change(folder, edit)
        with pytest.raises(ValueError, match=message):
            torch_armllm.load(str(folder))
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="is damaged or cut short"):
        torch_armllm.load(str(folder))
