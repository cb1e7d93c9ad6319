"""A recipe with bits gives each layer the scheme that it is worth, and the model has that many bits."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.quant.methods.loud_model import loud
from tests.support.calibration import CALIBRATION, same_tensors
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.checkpoint import quantize_folder as quantize_folder_module
from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.cli import main
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.report import LayerRecord


def mean_bits(records: list[LayerRecord]) -> float:
    """Bits a weight of the layers that are not heads."""
    counted = [x for x in records if x.quantized and x.kind != "head"]
    return 8 * sum(x.bytes_after for x in counted) / sum(x.parameters for x in counted)


def schemes(model: torch.nn.Module) -> dict[str, str]:
    """Scheme by name of the packed modules."""
    return {n: m.scheme for n, m in model.named_modules() if isinstance(m, (QuantLinear, QuantExperts))}


@cache
def bounds(kind: str) -> tuple[float, float]:
    """Bits a weight of INT4 and of INT8 everywhere."""
    recipes = Recipe(method="rtn"), Recipe("int8", method="rtn")
    least, most = (mean_bits(quantize(tiny(kind), recipe, progress=False)) for recipe in recipes)
    return least, most


@pytest.mark.parametrize("method", ["mse", "gptq", "rtn"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt2"])
def test_the_model_has_the_bits_that_were_asked_for(kind: str, method: str) -> None:
    least, most = bounds(kind)
    bits = round(0.5 * (least + most), 2)
    model = loud(kind)
    records = quantize(model, Recipe(method=method, bits=bits), progress=False, calibration=CALIBRATION)
    assert bits - 0.25 * (most - least) < mean_bits(records) <= bits
    assert {"g32iz", "int6"} <= set(schemes(model).values())
    with torch.no_grad():
        assert bool(model(token_ids(2, 9)).logits.isfinite().all())


def test_the_layers_that_lose_most_get_the_bits() -> None:
    model = tiny("llama")
    with torch.no_grad():
        for name in ("o_proj", "q_proj"):  # nothing that attention computes in this layer is seen
            getattr(model.model.layers[0].self_attn, name).weight.mul_(0)
    quantize(model, Recipe(bits=6.0), progress=False, calibration=CALIBRATION)
    found = schemes(model)
    assert {found[f"model.layers.0.self_attn.{x}_proj"] for x in "qkvo"} == {"g32iz"}
    assert {"int6", "int8"} & {found[f"model.layers.1.mlp.{x}_proj"] for x in ("gate", "up", "down")}


def test_gate_and_up_projection_stay_one_op() -> None:
    for bits in (5.0, 6.0, 7.0):
        model = loud("llama")
        quantize(model, Recipe(bits=bits), progress=False)
        for name, scheme in schemes(model).items():
            if name.endswith("gate_proj"):
                assert schemes(model)[name.replace("gate", "up")] == scheme


def test_more_bits_than_int4_has() -> None:
    usual = mean_bits(quantize(loud("llama"), Recipe(method="rtn"), progress=False))
    records = quantize(loud("llama"), Recipe(method="rtn", bits="+0.7"), progress=False)
    assert usual + 0.2 < mean_bits(records) <= usual + 0.7


def test_fewer_bits_than_int4_has_are_three_for_some_layers() -> None:
    usual = mean_bits(quantize(loud("llama"), Recipe(method="rtn"), progress=False))
    model = loud("llama")
    records = quantize(model, Recipe(method="rtn", bits=usual - 0.4), progress=False)
    assert usual - 0.8 < mean_bits(records) <= usual - 0.4
    assert set(schemes(model).values()) == {"g32iz", "int3", "int8"}
    assert {name for name, scheme in schemes(model).items() if scheme == "int8"} == {"lm_head"}


def test_overrides_stay_and_count() -> None:
    model = loud("llama")
    recipe = Recipe(bits=6.4, overrides={"*.down_proj": "int8", "*.0.self_attn.k_proj": "g32"})
    records = quantize(model, recipe, progress=False, calibration=CALIBRATION)
    found = schemes(model)
    assert {s for n, s in found.items() if n.endswith("down_proj")} == {"int8"}
    assert found["model.layers.0.self_attn.k_proj"] == "g32"
    assert mean_bits(records) <= 6.4


def test_too_few_bits_name_the_least_and_change_nothing() -> None:
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"bits=2.5 is too little .* need at least \d\.\d\d bits a weight"):
        torch_armllm.patch(model, Recipe(bits=2.5), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def folder_bytes(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def sizes_named(error: pytest.ExceptionInfo[ValueError]) -> list[float]:
    """The smallest and the largest size that an error names, in bytes."""
    return [float(x) * 1e6 for x in re.findall(r"(\d+\.\d{3}) MB", str(error.value))[:2]]


SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 500}


@pytest.mark.parametrize(
    ("kind", "head", "tied"),  # each pair of two values is here
    [
        ("llama", "int8", True), ("llama", "g32", False), ("llama", None, True),
        ("gemma3_text", "int8", False), ("gemma3_text", "g32", True), ("gemma3_text", None, False),
        ("qwen3_moe", "int8", True), ("qwen3_moe", "g32", False), ("qwen3_moe", None, True),
    ],
)  # fmt: skip
def test_the_saved_model_has_the_size_that_was_asked_for(
    kind: str, head: str | None, tied: bool, tmp_path: Path
) -> None:
    def model() -> Any:
        return loud(kind, tie_word_embeddings=tied, **SIZES).to(torch.bfloat16)

    with pytest.raises(ValueError, match="bits=1kB: this model can have") as error:
        quantize(model(), Recipe(bits="1kB", head=head), progress=False)
    least, most = sizes_named(error)
    with pytest.raises(ValueError, match="bits=1GiB: this model can have") as error:
        quantize(model(), Recipe(bits="1GiB", head=head), progress=False)
    assert sizes_named(error) == [least, most]
    for part, slack in ((0.0, 0.02), (0.6, 0.1)):  # two layers fill a size in large steps
        size = int(least + part * (most - least))
        quantized = model()
        quantize(quantized, Recipe(bits=f"{size / 1e6:.3f}MB", head=head), progress=False)
        quantized.save_pretrained(tmp_path / str(part))
        assert (1 - slack) * size < folder_bytes(tmp_path / str(part)) <= size


def test_the_folder_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    source, out = tmp_path / "float", tmp_path / "out"
    loud("llama", num_hidden_layers=6, **SIZES).save_pretrained(source)
    (source / "tokenizer.json").write_text(" " * 300_000)  # counts, as users see it
    with pytest.raises(ValueError, match="this model can have") as error:
        quantize_folder(source, out, Recipe(bits="9MB"), progress=False)
    assert not out.exists()
    least, most = sizes_named(error)
    size = int(0.4 * least + 0.6 * most)
    recipe = Recipe(bits=f"{size / 2**20:.4f}MiB")
    report = quantize_folder(source, out, recipe, progress=False, calibration=CALIBRATION)
    assert 0.98 * size < folder_bytes(out) <= size
    assert len({x.scheme for x in report.layers}) > 2
    loaded = torch_armllm.load(str(out), fuse=False)
    assert loaded.config.quantization_config.recipe.bits == recipe.bits


@pytest.mark.parametrize("bits", ["5", True, [5], "+", "+x", "-0.1", "GB", "-1GB", "1TB"])
def test_bits_are_a_number(bits: object) -> None:
    with pytest.raises(ValueError, match="bits must be bits a weight, such as 4.5, or more than int4"):
        Recipe(bits=bits)  # type: ignore[arg-type]


def test_bits_and_a_scheme_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave out the scheme 'g64'"):
        Recipe("g64", bits=5)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_patched_model_computes_as_its_modules_do(kind: str) -> None:
    model, ids = loud(kind), token_ids(2, 20)
    report = torch_armllm.patch(model, Recipe(bits=6.0), progress=False, calibration=CALIBRATION)
    assert report.captured, report.capture_reason
    with torch.no_grad():
        fused = model(ids).logits
        torch_armllm.unpatch(model)
        floats = model(ids).logits
    errors = (fused - floats).norm(dim=-1) / floats.norm(dim=-1)
    assert float(errors.median()) < 0.08  # a router's choice that flips changes all of a token


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["gptq", "mse"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_folder_to_folder_equals_in_memory(kind: str, method: str, tmp_path: Path) -> None:
    loud(kind).save_pretrained(tmp_path / "float")
    recipe = Recipe(method=method, bits=5.5)
    report = quantize_folder(
        tmp_path / "float", tmp_path / "out", recipe, progress=False, calibration=CALIBRATION
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    records = quantize(model, recipe, progress=False, calibration=CALIBRATION)
    assert [(x.name, x.scheme) for x in report.layers] == [(x.name, x.scheme) for x in records]
    assert len({x.scheme for x in records}) > 2
    model.save_pretrained(tmp_path / "saved")
    assert same_tensors(tmp_path / "out", tmp_path / "saved")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["bits"] == 5.5
    loaded = torch_armllm.load(str(tmp_path / "out"), fuse=False)
    assert schemes(loaded) == schemes(model)
    with pytest.raises(ValueError, match=r"to choose bits=5\.0, load the original model"):
        torch_armllm.patch(loaded, Recipe(bits=5.0))


def test_an_interrupted_run_keeps_its_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud("llama").save_pretrained(tmp_path / "float")
    recipe = Recipe(bits=5.5)
    whole = quantize_folder(
        tmp_path / "float", tmp_path / "whole", recipe, progress=False, calibration=CALIBRATION
    )
    measured = quantize_folder_module.measured_by_blocks
    load = BlockReader.load

    def then_interrupted(*arguments: object) -> object:
        result = measured(*arguments)  # type: ignore[arg-type]

        def interrupted(self: BlockReader, block: str) -> None:
            if block == "model.layers.1":
                raise KeyboardInterrupt
            load(self, block)

        monkeypatch.setattr(BlockReader, "load", interrupted)
        return result

    monkeypatch.setattr(quantize_folder_module, "measured_by_blocks", then_interrupted)
    arguments = tmp_path / "float", tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(*arguments, recipe, progress=False, calibration=CALIBRATION)
    monkeypatch.setattr(BlockReader, "load", load)
    monkeypatch.setattr(quantize_folder_module, "measured_by_blocks", None)  # it must not run again
    with pytest.raises(ValueError, match="holds an unfinished run of another"):
        quantize_folder(*arguments, Recipe(bits=5.0), progress=False, calibration=CALIBRATION)
    resumed = quantize_folder(*arguments, recipe, progress=False, calibration=CALIBRATION)
    assert resumed.layers == whole.layers
    assert same_tensors(tmp_path / "out", tmp_path / "whole")


def test_the_command_takes_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_armllm.llm import calibration_text

    monkeypatch.setattr(calibration_text, "SEQUENCES", 2)
    monkeypatch.setattr(calibration_text, "LENGTH", 24)
    loud("llama").save_pretrained(tmp_path / "float")
    source, out = str(tmp_path / "float"), tmp_path / "out"

    def run(*options: str) -> tuple[set[str], dict[str, Any]]:
        shutil.rmtree(out, ignore_errors=True)
        assert main.main(["quantize", source, str(out), "--json", *options]) == 0
        layers = json.loads(capsys.readouterr().out.splitlines()[-1])["layers"]
        settings = json.loads((out / "config.json").read_text())["quantization_config"]
        return {x["scheme"] for x in layers if x["kind"] == "linear"}, settings

    used, settings = run("--bits", "6")
    assert len(used) > 1
    assert (settings["method"], settings["bits"]) == ("gptq", 6.0)
    _, settings = run()
    assert (settings["method"], settings["bits"]) == ("gptq", "+0.05")
    used, settings = run("--fast")
    assert used == {"g32iz"}
    assert (settings["method"], settings["bits"]) == ("mse", None)
    used, settings = run("--quantization", "g64")
    assert (used, settings["method"], settings["bits"]) == ({"g64"}, "mse", None)
    used, settings = run("--method", "gptq")
    assert (used, settings["method"], settings["bits"]) == ({"g32iz"}, "gptq", None)
    assert main.main(["quantize", source, str(out), "--fast", "--method", "gptq"]) == 2
    assert "--fast is short for --method mse: leave out --method gptq" in capsys.readouterr().err
    used, settings = run("--bits", "0.1MB")
    assert len(used) > 1
    assert (settings["method"], settings["bits"]) == ("gptq", "0.1MB")
    assert folder_bytes(out) <= 100_000
    assert main.main(["quantize", source, str(out), "--bits", "x"]) == 2
    assert "--bits must be a number such as 4.5" in capsys.readouterr().err


def test_the_default_does_without_calibration_where_layers_share_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_armllm.llm import calibration_text
    from torch_armllm.quant.methods.calibrated.recorded_call import RecordedCall

    monkeypatch.setattr(calibration_text, "SEQUENCES", 2)
    monkeypatch.setattr(calibration_text, "LENGTH", 24)
    tiny("llama").save_pretrained(tmp_path / "float")
    monkeypatch.setattr(RecordedCall, "stateless", False)
    source, out = str(tmp_path / "float"), str(tmp_path / "out")
    assert main.main(["quantize", source, out, "--method", "gptq"]) == 2
    assert "cannot be calibrated layer by layer" in capsys.readouterr().err
    assert main.main(["quantize", source, out, "--json"]) == 0
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (settings["method"], settings["bits"]) == ("mse", None)
