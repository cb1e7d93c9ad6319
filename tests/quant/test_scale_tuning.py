"""Row scales learn from the float model; integers and all else stay."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_armllm
from tests.support.calibration import tensors
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.checkpoint import tuned_folder
from torch_armllm.checkpoint.load import load, load_model
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.checkpoint.saved_metadata import verify_folder
from torch_armllm.checkpoint.tuned_folder import tune_folder
from torch_armllm.cli.main import main
from torch_armllm.ops.linear import unpack_int
from torch_armllm.quant import scale_tuning
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.scale_tuning import tune_scales

TEXTS = token_ids(96, 24)


def packed(model: nn.Module) -> dict[str, QuantLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}


def panels(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: module.weight_packed.clone() for name, module in packed(model).items()}


def integers(module: QuantLinear) -> torch.Tensor:
    scheme = "i8" if module.scheme == "int8" else module.scheme
    return unpack_int(module.weight_packed, module.out_features, module.in_features, scheme)[0]


def pair(recipe: Recipe | str = "int4", family: str = "llama", spoil: float = 0.05) -> tuple[Any, Any]:
    """A quantized model whose row scales are off by up to ``spoil``, and its float model."""
    teacher = tiny(family)
    model = copy.deepcopy(teacher)
    quantize(model, recipe, progress=False)
    generator = torch.Generator().manual_seed(3)
    for name, module in packed(model).items():
        if name != "lm_head":
            scales = module.weight_packed[:, :64].view(torch.float32)
            scales *= 1 + spoil * (2 * torch.rand(scales.shape, generator=generator) - 1)
    return model, teacher


def test_the_divergence_falls_and_integers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_tuning, "_RATE", 2e-2)
    model, teacher = pair(spoil=0.2)
    before, old = panels(model), {n: integers(m) for n, m in packed(model).items()}
    tuned = tune_scales(model, teacher, TEXTS, progress=False)
    assert tuned.after < 0.8 * tuned.before
    for name, module in packed(model).items():
        assert torch.equal(integers(module), old[name])
        assert torch.equal(module.weight_packed, before[name]) == (name == "lm_head")
    other = copy.deepcopy(teacher)
    other.load_state_dict(teacher.state_dict())
    torch_armllm.patch(model)
    with torch.no_grad():
        patched = scale_tuning._divergence(model, other, TEXTS[-8:])
    assert patched == pytest.approx(tuned.after, rel=0.05)


def test_the_result_repeats_and_leaves_no_trace() -> None:
    results = []
    for _ in range(2):
        model, teacher = pair()
        wanted = [p.requires_grad for p in teacher.parameters()]
        tune_scales(model, teacher, TEXTS[:16], progress=False)
        assert [p.requires_grad for p in teacher.parameters()] == wanted
        assert all("forward" not in m.__dict__ for m in packed(model).values())
        assert all(p.grad is None for p in (*model.parameters(), *teacher.parameters()))
        results.append(panels(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("scheme", ["g32iz", "g32i", "int3", "int6", "int8", "row", "rowz", "g32"])
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("rotated", [False, True])
@torch.no_grad()
def test_gradients_are_of_the_same_products(scheme: str, digits: int, rotated: bool) -> None:
    linear = nn.Linear(96, 40)
    shell = nn.ModuleDict({"layer": linear})
    wide = ("*",) if digits == 2 else ()
    quantize(shell, Recipe(scheme, int16_activations=wide), progress=False)
    module = shell["layer"]
    assert isinstance(module, QuantLinear)
    module.rotated = rotated
    stand_in = scale_tuning._DifferentiableLinear(module, tuned=True)
    assert (stand_in.gain is None) == (scheme == "g32")
    x = torch.randn(3, 5, 96)
    assert (stand_in(x) - module(x)).norm() < 0.01 * module(x).norm()
    if stand_in.gain is not None:
        stand_in.gain.mul_(torch.linspace(0.5, 1.5, 40))
        stand_in.store()
        assert (stand_in(x) - module(x)).norm() < 0.01 * module(x).norm()


def test_scales_stay_if_nothing_is_won(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scale_tuning, "_RATE", 30.0)
    model, teacher = pair()
    before = panels(model)
    with caplog.at_level(logging.WARNING):
        tuned = tune_scales(model, teacher, TEXTS[:16], progress=False)
    assert tuned.before == tuned.after and "scales stay" in caplog.text
    assert all(torch.equal(panels(model)[name], before[name]) for name in before)


def test_what_cannot_be_tuned_is_refused() -> None:
    model, teacher = pair()
    with pytest.raises(ValueError, match="two texts or more, not 1"):
        tune_scales(model, teacher, TEXTS[:1], progress=False)
    torch_armllm.patch(model)
    with pytest.raises(ValueError, match="the model is patched"):
        tune_scales(model, teacher, TEXTS[:4], progress=False)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts holds packed experts"):
        tune_scales(*pair(family="qwen3_moe", spoil=0), TEXTS[:4], progress=False)
    floats = tiny("llama")
    quantize(floats, "g32", progress=False)
    with pytest.raises(ValueError, match="no layer of the model has a scheme with one scale a row"):
        tune_scales(floats, teacher, TEXTS[:4], progress=False)
    model, teacher = pair()
    with torch.no_grad():
        next(teacher.parameters()).fill_(float("nan"))
    before = panels(model)
    with pytest.raises(ValueError, match="no finite numbers"):
        tune_scales(model, teacher, TEXTS[:4], progress=False)
    assert all(torch.equal(panels(model)[name], before[name]) for name in before)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A float model, and what is made of it."""
    source, out = tmp_path / "float", tmp_path / "int4"
    tiny("llama").save_pretrained(source)
    quantize_folder(source, out, Recipe("int4", method="rtn"), progress=False)
    return source, out


def test_a_folder_is_tuned_in_place(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_tuning, "_RATE", 5e-3)
    source, out = folders
    before = tensors(out)
    mode = next(out.glob("*.safetensors")).stat().st_mode
    tuned = tune_folder(str(source), out, TEXTS, progress=False)
    assert tuned.after < tuned.before
    assert verify_folder(str(out)) == len(before)
    assert {file.stat().st_mode for file in out.glob("*.safetensors")} == {mode}
    changed = {name for name, tensor in tensors(out).items() if not torch.equal(tensor, before[name])}
    assert changed == {n for n in before if "layers" in n and n.endswith("weight_packed")}
    model = load(str(out), fuse=False)
    direct = load_model(str(source), "auto")
    with torch.no_grad():
        assert scale_tuning._divergence(model, direct, TEXTS[-8:]) == pytest.approx(tuned.after, rel=0.05)


def test_a_folder_stays_whole_if_writing_fails(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(scale_tuning, "_RATE", 5e-3)
    monkeypatch.setattr(tuned_folder, "write_shard", full)
    source, out = folders
    before = tensors(out)
    with pytest.raises(OSError, match="No space left"):
        tune_folder(str(source), out, TEXTS, progress=False)
    after = tensors(out)
    assert all(torch.equal(after[name], before[name]) for name in before) and not list(out.glob("*.part"))


def test_the_command_tunes_after_rounding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dense, moe = tmp_path / "dense", tmp_path / "moe"
    tiny("llama").save_pretrained(dense)
    tiny("qwen3_moe").save_pretrained(moe)
    for source in (dense, moe):
        with caplog.at_level(logging.INFO, "torch_armllm"):
            main(["quantize", str(source), str(tmp_path / f"{source.name}-4"), "--fast", "--tune", "4"])
        verify_folder(str(tmp_path / f"{source.name}-4"))
    assert "row scales are not tuned: model.layers.0.mlp.experts holds experts" in caplog.text
    for text in ("1", "-3"):
        assert main(["quantize", str(dense), str(tmp_path / "x"), "--tune", text]) == 2
    assert not (tmp_path / "x").exists()
