"""Checkpoints that do not fit their configuration, or whose values are damaged, are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.formats import test_awq, test_gptq
from tests.fuzz.checkpoints.corpus import COMPRESSED, encode_compressed
from tests.support import saved_folders
from tests.support.models import tiny
from torch_armllm import ArmInt4Config, Recipe, load
from torch_armllm.checkpoint.load import load_model
from torch_armllm.quant.inplace import quantize


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edits the tensors of a file, and keeps what its header says."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    state = load_file(file)
    edit(state)
    save_file(state, file, metadata)


def retyped(folder: Path, name: str, dtype: str) -> None:
    """Changes the dtype of a tensor in the header of its file."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A quantized folder."""
    model = tiny("llama")
    quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def awq(folder: Path) -> Path:
    saved_folders.write(folder, "qwen3", test_awq.encoder(32), test_awq.settings(32))
    return folder / "quantized"


def compressed(folder: Path) -> Path:
    saved_folders.write(folder, "qwen3", encode_compressed, COMPRESSED)
    return folder / "quantized"


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
    with pytest.raises(ValueError, match=message):
        load(str(folder), fuse=False)


def test_a_narrow_weight_of_another_shape(tmp_path: Path) -> None:
    """A layer too narrow to be packed becomes floats, of the model's shape as well."""
    folder = awq(tmp_path)
    edit_config(folder, lambda config: config.update(head_dim=1))
    for name in ("q_norm", "k_norm"):
        edit_tensors(
            folder, lambda state, n=name: state.update({k: v[:1] for k, v in state.items() if n in k})
        )
    with pytest.raises(
        ValueError, match=r"k_proj.weight has the shape \(64, 64\) .* and \(2, 64\) in the model"
    ):
        load(str(folder), fuse=False)


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
    with pytest.raises(ValueError, match=f"{message}|dtype and shape of {name}"):
        load(str(saved), fuse=False)


def test_floats_of_one_size_in_saved_folders(tmp_path: Path) -> None:
    model = tiny("llama", torch.bfloat16)
    quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(tmp_path)
    retyped(tmp_path, "model.norm.weight", "F16")
    with pytest.raises(ValueError, match=r"dtype and shape of model.norm.weight in .* is \['F16', .*'BF16'"):
        load(str(tmp_path), fuse=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mlp.up_proj.qweight", "F32"), ("mlp.up_proj.scales", "I16"), ("input_layernorm.weight", "I32")],
)
def test_dtypes_of_other_tools(name: str, dtype: str, tmp_path: Path) -> None:
    folder = awq(tmp_path)
    retyped(folder, f"model.layers.0.{name}", dtype)
    with pytest.raises(ValueError, match=rf"{name} .*is {dtype}.* expected|{name} is {dtype} in .* expected"):
        load(str(folder), fuse=False)


def test_missing_zero_points(tmp_path: Path) -> None:
    folder = compressed(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight_zero_point"
    edit_tensors(folder, lambda state: state.pop(name))
    with pytest.raises(ValueError, match=f"not symmetric, and {name} is missing"):
        load(str(folder), fuse=False)


def test_missing_permutations(tmp_path: Path) -> None:
    options = (32, True, 1, True)
    saved_folders.write(tmp_path, "llama", test_gptq.encoder(*options), test_gptq.settings(*options))
    name = "model.layers.1.mlp.up_proj.g_idx"
    edit_tensors(tmp_path / "quantized", lambda state: state.pop(name))
    with pytest.raises(ValueError, match=f"desc_act is true, and {name} is missing"):
        load(str(tmp_path / "quantized"), fuse=False)


def test_zero_points_of_another_version(tmp_path: Path) -> None:
    options = (32, True, 1, False)
    settings = {**test_gptq.settings(*options), "checkpoint_format": "gptq_v2"}
    saved_folders.write(tmp_path, "llama", test_gptq.encoder(*options), settings)
    with pytest.raises(ValueError, match="sym is true and all zero points are 7, where 8 is expected"):
        load(str(tmp_path / "quantized"), fuse=False)


def spoil_scale(packed: Tensor, value: float = float("nan")) -> None:
    packed.view(-1)[:4] = torch.tensor([value]).view(torch.uint8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norms_that_are_not_finite(value: float, saved: Path, tmp_path: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    folders = [saved, awq(tmp_path), tmp_path / "float"]
    for folder in folders:
        edit_tensors(folder, lambda state: state[name].view(-1)[3:4].fill_(value))
        with pytest.raises(ValueError, match=rf"{name} in .* holds {value} at \(3,\), and finite values are"):
            load(str(folder), fuse=False)
    with pytest.raises(ValueError, match=f"{name} in .* holds {value}"):
        load_model(str(folders[-1]))


@pytest.mark.parametrize("scheme", ["g32i", "g32", "g64zb", "g32m", "int8", "int8g32", "int8g32m", "row"])
def test_scales_that_are_not_finite(scheme: str, tmp_path: Path) -> None:
    model = tiny("llama")
    quantize(model, Recipe(scheme, importance=False), progress=False)
    model.save_pretrained(tmp_path)
    load(str(tmp_path), fuse=False)
    name = "model.layers.1.mlp.down_proj.weight_packed"
    start = 64 if scheme in ("g32", "g64zb", "g32m") else 0

    def spoil(state: dict[str, Tensor]) -> None:
        not_a_number = torch.full((2,), float("nan"), dtype=torch.bfloat16).view(torch.uint8)
        state[name][-1, start : start + 4] = not_a_number

    edit_tensors(tmp_path, spoil)
    with pytest.raises(
        ValueError, match=f"{name} in .*model.safetensors has a scale that is NaN, infinite or above"
    ):
        load(str(tmp_path), fuse=False)


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 8e37])
def test_scales_of_compressed_tensors(value: float, tmp_path: Path) -> None:
    folder, name = compressed(tmp_path), "model.layers.1.mlp.down_proj"
    edit_tensors(folder, lambda state: state[f"{name}.weight_scale"].view(-1)[3:4].fill_(value))
    with pytest.raises(ValueError, match=rf"{name}: a scale is NaN, infinite or above 2\^100"):
        load(str(folder), fuse=False)


@pytest.mark.parametrize("value", [float("nan"), -3e38, 2.0**100])
def test_scales_of_experts(value: float, tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.down_packed"
    edit_tensors(tmp_path, lambda state: spoil_scale(state[name][7, 2], value))
    with pytest.raises(ValueError, match=f"{name} in .* has a scale that is NaN, infinite or above"):
        load(str(tmp_path), fuse=False)


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
    model = tiny("qwen3_moe", moe_intermediate_size=48)
    quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, lambda config: config.update({field: value}))
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path), fuse=False)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (97, r"holds 97, and a permutation of 0 … 63"),
        (-1, "holds -1, and a perm"),
        (None, "2 times, and a perm"),
    ],
)
def test_orders_that_are_no_permutations(entry: int | None, message: str, tmp_path: Path) -> None:
    options = (32, True, 1, True)
    saved_folders.write(tmp_path, "llama", test_gptq.encoder(*options), test_gptq.settings(*options))
    load(str(tmp_path / "quantized"), Recipe(head=None), fuse=False).save_pretrained(tmp_path / "saved")
    name = "model.layers.0.self_attn.q_proj.order"

    def damage(state: dict[str, Tensor]) -> None:
        state[name][5] = int(state[name][4]) if entry is None else entry

    edit_tensors(tmp_path / "saved", damage)
    with pytest.raises(
        ValueError, match=f"{name} in .*model.safetensors holds.*{message.removeprefix('holds')}"
    ):
        load(str(tmp_path / "saved"), fuse=False)


def test_a_scheme_of_the_same_size(tmp_path: Path) -> None:
    model = tiny("llama", hidden_size=128, intermediate_size=128)
    quantize(model, Recipe("row", importance=False), progress=False)
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj"
    modules = lambda config: config["quantization_config"]["modules"]  # noqa: E731
    edit_config(tmp_path, lambda config: modules(config)[name].update(scheme="g32"))
    with pytest.raises(
        ValueError, match=f"{name}.* of scheme 'g32', .*'row'|{name}.weight_packed has the shape"
    ):
        load(str(tmp_path), fuse=False)
    edit_config(tmp_path, lambda config: modules(config)[name].update(scheme="g64b"))
    with pytest.raises(
        ValueError, match=f"{name}.* of scheme 'g64b', .*'row'|{name}.weight_packed has the sh"
    ):
        load(str(tmp_path), fuse=False)


def test_layers_that_the_configuration_leaves_out(saved: Path, tmp_path: Path) -> None:
    for folder, message in ((saved, "layers.1"), (awq(tmp_path), "has no model.layers.1")):
        edit_config(folder, lambda config: config.update(num_hidden_layers=1, layer_types=None))
        with pytest.raises(ValueError, match=message):
            load(str(folder), fuse=False)


def test_biases_that_the_model_lacks(tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", encode_compressed, COMPRESSED, attention_bias=True)
    folder = tmp_path / "quantized"
    edit_config(folder, lambda config: config.update(attention_bias=False))
    with pytest.raises(ValueError, match=r"_proj.bias in .* is not 0, and the model has no such bias"):
        load(str(folder), fuse=False)
    edit_tensors(folder, lambda state: [one.zero_() for name, one in state.items() if name.endswith("bias")])
    load(str(folder), fuse=False)


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
    with pytest.raises(ValueError, match=message):
        load(str(saved), fuse=False)


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
    with pytest.raises(ValueError, match=message):
        load(str(saved), fuse=False)


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
    options = (32, True, 1, False)
    settings = {**test_gptq.settings(*options), **change}
    saved_folders.write(tmp_path, "llama", test_gptq.encoder(*options), settings)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / "quantized"), fuse=False)


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
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / "quantized"), fuse=False)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": 1}}', "nonsense"]
)
def test_damaged_indices(content: str, tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", test_awq.encoder(32), test_awq.settings(32))
    (tmp_path / "quantized" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"model.safetensors.index.json .*(damaged|weight_map)|weight_map in"
    ):
        load(str(tmp_path / "quantized"), fuse=False)


def test_an_index_that_leaves_the_folder(tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", test_awq.encoder(32), test_awq.settings(32))
    index = {"weight_map": {"model.norm.weight": "../float/model.safetensors"}}
    (tmp_path / "quantized" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"'../float/model.safetensors' .*, and the name of a file is expected"
    ):
        load(str(tmp_path / "quantized"), fuse=False)


def test_a_tensor_in_two_files(saved: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    first, second = sorted((tmp_path / "shards").glob("*.safetensors"))[:2]
    save_file({**load_file(second), **load_file(first)}, second, {"format": "pt"})
    with pytest.raises(ValueError, match=rf" is in {first} and in {second}: one file holds each tensor"):
        load(str(tmp_path / "shards"), fuse=False)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    edit_config(tmp_path, lambda config: config.update(model_type="evil", auto_map=names))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for loads in (load, load_model):
        with pytest.raises(
            ValueError, match=r"needs code of its own \(auto_map in config.json\), which is never"
        ):
            loads(str(tmp_path))


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


def test_pickles_cannot_run_code(tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", test_awq.encoder(32), test_awq.settings(32))
    for folder in (tmp_path / "quantized", tmp_path / "float"):
        (folder / "model.safetensors").unlink()
        torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is damaged, or its tensors are pickled objects"):
        load(str(tmp_path / "quantized"), fuse=False)
    with pytest.raises(ValueError, match="float"):
        load(str(tmp_path / "float"), fuse=False)


def test_transformers_own_api_checks_too(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    edit_tensors(saved, lambda state: state["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"model.norm.weight in .*model.safetensors holds nan at \(0,\)"):
        AutoModelForCausalLM.from_pretrained(saved)
    assert ArmInt4Config().stored is None
