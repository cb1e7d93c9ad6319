"""Tensors of shapes, dtypes or names that do not fit the configuration are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.damaged_folders import (
    awq,
    compressed,
    edit_config,
    edit_tensors,
    packed,
    refused,
    retyped,
)
from tests.checkpoint.formats import test_gptq
from tests.fuzz.checkpoints.corpus import COMPRESSED, encode_compressed
from tests.support import saved_folders
from torch_armllm import load


@pytest.mark.parametrize("write", [awq, compressed])
@pytest.mark.parametrize("head_dim", [1, 2, 16])
def test_shapes_that_do_not_fit_the_configuration(
    write: Callable[[Path], Path], head_dim: int, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    edit_config(folder, lambda config: config.update(head_dim=head_dim))
    message = (
        rf"q_proj.* has the shape .*128.* and .*{4 * head_dim}.* in the model|[qk]_norm.* has the shape \(32"
    )
    refused(folder, message)


def test_a_narrow_weight_of_another_shape(tmp_path: Path) -> None:
    """A layer too narrow to be packed becomes floats, of the model's shape as well."""
    folder = awq(tmp_path)
    edit_config(folder, lambda config: config.update(head_dim=1))
    for name in ("q_norm", "k_norm"):
        edit_tensors(
            folder, lambda state, n=name: state.update({k: v[:1] for k, v in state.items() if n in k})
        )
    refused(folder, r"k_proj.weight has the shape \(64, 64\) .* and \(2, 64\) in the model")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("model.layers.0.mlp.up_proj.weight_packed", "F8_E4M3", "is F8_E4M3 in .*, and U8 is expected"),
        ("model.layers.0.mlp.up_proj.weight_packed", "I8", "is I8 in .*, and U8 is expected"),
        (
            "model.norm.weight",
            "I32",
            "norm.weight is I32 in .*model.safetensors, and F64 or F32 or F16 or BF16",
        ),
    ],
)
def test_dtypes_of_saved_folders(name: str, dtype: str, message: str, saved: Path) -> None:
    retyped(saved, name, dtype)
    refused(saved, f"{message}|dtype and shape of {name}")


def test_floats_of_one_size_in_saved_folders(tmp_path: Path) -> None:
    packed(tmp_path, "llama", dtype=torch.bfloat16)
    retyped(tmp_path, "model.norm.weight", "F16")
    refused(tmp_path, r"dtype and shape of model.norm.weight in .* is \['F16', .*'BF16'")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mlp.up_proj.qweight", "F32"), ("mlp.up_proj.scales", "I16"), ("input_layernorm.weight", "I32")],
)
def test_dtypes_of_other_tools(name: str, dtype: str, tmp_path: Path) -> None:
    folder = awq(tmp_path)
    retyped(folder, f"model.layers.0.{name}", dtype)
    refused(folder, rf"{name} .*is {dtype}.* expected|{name} is {dtype} in .* expected")


def test_missing_zero_points(tmp_path: Path) -> None:
    folder = compressed(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight_zero_point"
    edit_tensors(folder, lambda state: state.pop(name))
    refused(folder, f"not symmetric, and {name} is missing")


def test_missing_permutations(tmp_path: Path) -> None:
    test_gptq.write(tmp_path, "llama", (32, True, 1, True))
    name = "model.layers.1.mlp.up_proj.g_idx"
    edit_tensors(tmp_path / "quantized", lambda state: state.pop(name))
    refused(tmp_path / "quantized", f"desc_act is true, and {name} is missing")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "moe_intermediate_size",
            47,
            r"has the sizes \[8, 47, 64\] by .*, and \[8, 48, 64\] were",
        ),
        ("num_local_experts", 2**31, r"num_.*experts is 2147483648 .*, and at most 65536 is expected"),
    ],
)
def test_sizes_of_experts(field: str, value: int, message: str, tmp_path: Path) -> None:
    packed(tmp_path, "qwen3_moe", moe_intermediate_size=48)
    edit_config(tmp_path, lambda config: config.update({field: value}))
    refused(tmp_path, message)


def test_a_scheme_of_the_same_size(tmp_path: Path) -> None:
    packed(tmp_path, "llama", "row", hidden_size=128, intermediate_size=128)
    name = "model.layers.1.mlp.up_proj"
    modules = lambda config: config["quantization_config"]["modules"]  # noqa: E731
    edit_config(tmp_path, lambda config: modules(config)[name].update(scheme="g32"))
    refused(tmp_path, f"{name}.* of scheme 'g32', .*'row'|{name}.weight_packed has the shape")
    edit_config(tmp_path, lambda config: modules(config)[name].update(scheme="g64b"))
    refused(tmp_path, f"{name}.* of scheme 'g64b', .*'row'|{name}.weight_packed has the sh")


def test_layers_that_the_configuration_leaves_out(saved: Path, tmp_path: Path) -> None:
    for folder, message in ((saved, "layers.1"), (awq(tmp_path), "has no such tensor.* fewer layers")):
        edit_config(folder, lambda config: config.update(num_hidden_layers=1, layer_types=None))
        refused(folder, message)


def test_biases_that_the_model_lacks(tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", encode_compressed, COMPRESSED, attention_bias=True)
    folder = tmp_path / "quantized"
    edit_config(folder, lambda config: config.update(attention_bias=False))
    refused(folder, r"_proj.bias and \d more, and LlamaForCausalLM has no such tensor")
    edit_tensors(folder, lambda state: [one.zero_() for name, one in state.items() if name.endswith("bias")])
    load(str(folder), fuse=False)
