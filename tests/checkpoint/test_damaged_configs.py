"""Damaged configurations and indices are refused with the field and its value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint.damaged_folders import edit_config, refused
from tests.checkpoint.formats import test_awq, test_gptq
from tests.fuzz.checkpoints.corpus import COMPRESSED, encode_compressed
from tests.support import saved_folders
from tests.support.models import tiny

DAMAGED: list[tuple[str, Any, str]] = [
    ("modules", [1], "modules must be an object with an entry for each packed module"),
    ("modules", {"lm_head": 3}, r"modules\['lm_head'\] must be an object with a scheme, not 3"),
    ("modules", {"lm_head": {"scheme": ["int8"]}}, "must be an object with a scheme"),
    ("modules", {"": {"scheme": "int8"}}, "names the module '', which LlamaForCausalLM does not have"),
    ("scheme", ["g32i"], "unknown quantization scheme"),
    ("scheme", None, "unknown quantization scheme None"),
    ("head", {}, "unknown quantization scheme {}"),
    ("ignore", None, "ignore must be a list of patterns, not None"),
    ("ignore", [1], r"ignore must be a list of patterns, not \[1\]"),
    ("overrides", ["x"], "overrides must be a dictionary"),
    ("allow_outliers", "no", "allow_outliers must be true or false"),
    ("importance", 3, "importance must be true, false or null"),
    ("kv_cache", ["int8"], "kv_cache_dtype must be one of"),
    ("fuse", "yes", "fuse must be true or false"),
    ("source", 3, "source must be the name of a tool"),
]


@pytest.mark.parametrize(("field", "value", "message"), DAMAGED)
def test_damaged_quantization_configs(field: str, value: Any, message: str, saved: Path) -> None:
    edit_config(saved, lambda config: config["quantization_config"].update({field: value}))
    refused(saved, message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 2**32, "num_hidden_layers is 4294967296 .*, and 1 to 1000 is expected"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0 .*, and 1 to 1000 is expected"),
        ("head_dim", 2**31, "head_dim is 2147483648 .*, and at most 16777216 is expected"),
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("hidden_act", "x", "KeyError: 'x'"),
        ("hidden_size", "64", "hidden_size"),
        ("rope_parameters", 3, "rope_parameters"),
        ("quantization_config", "gptq", "AttributeError: 'str' object has no attribute 'to_dict'"),
    ],
)
def test_damaged_configurations(field: str, value: Any, message: str, saved: Path) -> None:
    edit_config(saved, lambda config: config.update({"layer_types": None, "head_dim": None, field: value}))
    refused(saved, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": None}, "group_size is None, and an integer is expected"),
        ({"group_size": [32]}, r"group_size is \[32\], and an integer is expected"),
        ({"sym": "yes"}, "sym is 'yes', and true or false is expected"),
        ({"bits": {}}, "bits is {}, and an integer is expected"),
    ],
)
def test_damaged_settings_of_gptq(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    test_gptq.write(tmp_path, "llama", (32, True, 1, False), change)
    refused(tmp_path / "quantized", message)


WEIGHTS = COMPRESSED["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"a": {"targets": ["Linear"], "weights": {**WEIGHTS, "symmetric": None}}},
            "symmetric is None, and true or false is expected",
        ),
        ([1], r"config_groups is \[1\], and an object is expected"),
        ({"a": 1}, "a is 1, and an object is expected"),
        ({"a": {"targets": "Linear", "weights": {"num_bits": 4, "strategy": "group"}}}, "a list of names"),
        ({"a": {"targets": ["re:("], "weights": {"num_bits": 4, "strategy": "channel"}}}, "no regular expr"),
    ],
)
def test_damaged_settings_of_compressed_tensors(groups: Any, message: str, tmp_path: Path) -> None:
    settings = {**COMPRESSED, "config_groups": groups}
    saved_folders.write(tmp_path, "llama", encode_compressed, settings)
    refused(tmp_path / "quantized", message)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": 1}}', "nonsense"]
)
def test_damaged_indices(content: str, tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", test_awq.encoder(32), test_awq.settings(32))
    (tmp_path / "quantized" / "model.safetensors").unlink()  # which would count
    (tmp_path / "quantized" / "model.safetensors.index.json").write_text(content)
    refused(tmp_path / "quantized", r"model.safetensors.index.json .*(damaged|weight_map)|weight_map in")


def test_an_index_that_leaves_the_folder(tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", test_awq.encoder(32), test_awq.settings(32))
    index = {"weight_map": {"model.norm.weight": "../float/model.safetensors"}}
    (tmp_path / "quantized" / "model.safetensors").unlink()  # which would count
    (tmp_path / "quantized" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path / "quantized", r"'../float/model.safetensors' .*, and the name of a file is expected")


def test_a_tensor_in_two_files(saved: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    first, second = sorted((tmp_path / "shards").glob("*.safetensors"))[:2]
    save_file({**load_file(second), **load_file(first)}, second, {"format": "pt"})
    refused(tmp_path / "shards", rf" is in {first} and in {second}: one file holds each tensor")
