"""transformers' own API: quantization while loading, saving and loading, and damaged checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.checkpoint.damaged_folders import edit_config
from tests.support.models import logits, tiny, token_ids
from torch_armllm import ArmInt4Config, Recipe
from torch_armllm.patching.state import is_patched
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding

FAMILIES = ["llama", "gpt2", "phi3", "mixtral", "qwen3_moe", "gpt_oss"]


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def rewrite(folder: Path, change: Any) -> None:
    """Changes the tensors of a single-file checkpoint."""
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, {"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_quantizes_as_patch_does_and_saving_keeps_every_bit(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path / "float")
    loaded = load(tmp_path / "float", quantization_config=ArmInt4Config())
    report = torch_armllm.patch(model, Recipe(importance=False), progress=False)
    expected = logits(model)
    assert torch_armllm.is_patched(loaded)
    found = loaded.hf_quantizer.report
    assert found.bytes_before == report.bytes_before
    assert {x.name: x.error for x in found.layers} == {x.name: x.error for x in report.layers}
    assert str(found).startswith(str(report).rstrip())
    assert (logits(loaded) - expected).abs().max() == 0
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))

    for index, source in enumerate((loaded, model)):
        folder = tmp_path / f"packed{index}"
        source.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
        again = load(folder)
        assert torch.equal(logits(again), expected)
        assert torch_armllm.is_patched(again) and again.hf_quantizer.report.captured
        assert again.hf_quantizer.report.bytes_before == report.bytes_before
        assert again.hf_quantizer.report.share == report.share
    assert sorted(torch_armllm.unpatch(again)) == sorted(torch_armllm.unpatch(model))
    assert "quantization_config" not in again.config.to_dict()
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "rounded")
    torch.testing.assert_close(logits(load(tmp_path / "rounded")), logits(model))


@pytest.mark.parametrize(
    ("family", "override", "scheme", "error"),
    [
        ("llama", "*.up_proj", "int3", 0.15),
        ("llama", "*_proj", "int3", 0.15),
        ("mixtral", "experts", "int3", 0.15),
        ("llama", "*_proj", "int5", 0.045),
        ("mixtral", "experts", "int5", 0.045),
    ],
)
def test_layers_of_other_bits(family: str, override: str, scheme: str, error: float, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path / "float")
    recipe = Recipe(overrides={override: scheme})
    model = load(tmp_path / "float", quantization_config=ArmInt4Config(recipe))
    report = model.hf_quantizer.report
    chosen = [layer for layer in report.layers if layer.scheme == scheme]
    assert chosen and all(error / 1.5 < (layer.error or 0) < error * 1.34 for layer in chosen)
    assert report.captured
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert again.hf_quantizer.report.captured
    assert torch.equal(logits(again), logits(model))
    assert sorted(torch_armllm.unpatch(again)) == sorted(torch_armllm.unpatch(model))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("dtype", "head"), [(torch.bfloat16, "int8"), (torch.bfloat16, "int6"), (torch.float32, "int8")]
)
def test_head_that_is_tied_to_the_embedding(dtype: torch.dtype, head: str, tmp_path: Path) -> None:
    tiny("llama", dtype, tie_word_embeddings=True).save_pretrained(tmp_path / "float")
    model = load(tmp_path / "float", quantization_config=ArmInt4Config(Recipe(head=head)))
    shared = dtype == torch.bfloat16
    assert isinstance(model.get_input_embeddings(), TiedEmbedding) == shared
    assert isinstance(model.get_output_embeddings(), QuantLinear)
    assert model.get_output_embeddings().scheme == head
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert torch.equal(logits(again), logits(model))
    if shared:
        packed = again.get_output_embeddings().weight_packed
        assert again.get_input_embeddings().weight_packed.data_ptr() == packed.data_ptr()
    twin = tiny("llama", dtype, tie_word_embeddings=True)
    twin.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq
    report = torch_armllm.patch(twin, Recipe(head=head, importance=False), progress=False)
    assert (
        abs(report.bytes_before - again.hf_quantizer.report.bytes_before) < 64
    )  # frequencies of another type
    assert torch.equal(logits(twin), logits(again))
    for loaded in (again, twin):
        torch_armllm.unpatch(loaded)
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits(twin), logits(again))


def test_weights_are_memory_mapped(saved: Path) -> None:
    model = load(saved)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(saved) in line]
    spans = [[int(end, 16) for end in fields[0].split("-")] for fields in mapped]
    at = model.model.layers[0].mlp.down_proj.weight_packed.data_ptr()
    assert any(begin <= at < end for begin, end in spans)


def test_options_are_saved(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "float")
    recipe = Recipe("row", head=None, ignore=["*.k_proj"])
    options = ArmInt4Config(recipe, kv_cache_dtype="int8", fuse=False)
    model = load(tmp_path / "float", quantization_config=options)
    assert not torch_armllm.is_patched(model)
    assert {m.scheme for m in model.modules() if isinstance(m, (QuantExperts, QuantLinear))} == {"row"}
    assert type(model.lm_head) is type(model.model.layers[0].self_attn.k_proj) is torch.nn.Linear
    with pytest.raises(ValueError, match="packed as 'row' already"):
        torch_armllm.patch(model, "int4")
    report = torch_armllm.patch(model, "row", kv_cache_dtype="int8")
    assert report.captured and 0.9 < report.share < 1
    model.save_pretrained(tmp_path / "packed")
    config = load(tmp_path / "packed").config.quantization_config
    assert (config.recipe, config.kv_cache_dtype) == (recipe, "int8")


def test_a_saved_folder_is_patched_only_if_asked(saved: Path, tmp_path: Path) -> None:
    unpatched = torch_armllm.load(str(saved), fuse=False)
    assert not is_patched(unpatched)
    torch_armllm.patch(unpatched)
    unpatched.save_pretrained(tmp_path)
    assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path))  # as it was patched when it was saved
    ids = token_ids()
    assert torch.equal(unpatched(ids).logits, torch_armllm.load(str(saved))(ids).logits)
    torch_armllm.load(str(saved), fuse=False).save_pretrained(tmp_path)
    assert is_patched(torch_armllm.load(str(tmp_path)))


def test_the_type_of_the_kv_cache_can_be_replaced(saved: Path) -> None:
    model = torch_armllm.load(str(saved), kv_cache_dtype="int8", fuse=False)
    assert model.config.quantization_config.kv_cache_dtype == "int8"


def test_importance_equals_that_of_patch(tmp_path: Path) -> None:
    model = tiny("mixtral")
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, quantization_config=ArmInt4Config(Recipe(importance=True)))
    torch_armllm.patch(model, progress=False)
    assert torch.equal(logits(loaded), logits(model))
    plain = load(tmp_path, quantization_config=ArmInt4Config())
    plain.save_pretrained(tmp_path / "packed")
    said = [
        any("importance=True" in note for note in m.hf_quantizer.report.notes)
        for m in (loaded, plain, load(tmp_path / "packed"))
    ]
    assert said == [False, True, False]


class Hub:
    """The calls of `push_to_hub`, on a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_repo(self, repo_id: str, **_: Any) -> SimpleNamespace:
        self.folder.mkdir()
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, operations: list[Any], **_: Any) -> str:
        for operation in operations:
            shutil.copy(operation.path_or_fileobj, self.folder / operation.path_in_repo)
        return "committed"


def test_model_pushed_to_the_hub_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mixtral")
    torch_armllm.patch(model, progress=False)
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: hub)
    monkeypatch.setattr(
        "transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: ModelCard("a card")
    )
    assert model.push_to_hub("someone/mixtral-int4", max_shard_size="20KB") == "committed"
    pushed = {file.name for file in hub.folder.iterdir()}
    assert {"README.md", "config.json", "model.safetensors.index.json"} <= pushed
    assert torch.equal(logits(load(hub.folder)), logits(model))


def test_transformers_dequantizes(saved: Path) -> None:
    model = load(saved)
    expected = logits(model)
    model = model.dequantize()
    assert not torch_armllm.is_patched(model)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert (logits(model) - expected).norm() < 0.05 * expected.norm()


def test_generate_after_loading(saved: Path) -> None:
    out = load(saved).generate(token_ids(1, 5), max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 9)


def in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in which ``opened`` loads a folder with transformers alone."""
    opened = "from transformers import AutoModelForCausalLM as A\nopened = A.from_pretrained\n"
    code = code.replace("import opened\n", opened)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done


def test_importing_the_package_is_light(saved: Path) -> None:
    edit_config(saved, lambda config: config["quantization_config"].update(fuse=False))
    done = in_a_new_process(
        "import torch_armllm, sys\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        f"import opened\nopened({str(saved)!r}).generate"
    )
    assert "Unknown quantization type" not in done.stderr


def test_saved_folders_open_after_an_import_of_the_package_or_by_its_entry_point(
    saved: Path, tmp_path: Path
) -> None:
    """The entry point is that of an installed package, and torch calls it."""
    edit_config(saved, lambda config: config["quantization_config"].update(fuse=False))
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    entry = text.partition('[project.entry-points."torch.backends"]\n')[2].partition("\n\n")[0]
    installed = tmp_path / "site" / "probe-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{entry.replace(chr(34), '')}\n")
    paths = os.pathsep.join([str(installed.parent), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    kind = f"print(type(opened({str(saved)!r}).model.layers[0].mlp.down_proj).__name__)\n"
    code = {"1": f"import opened\n{kind}", "0": f"import opened\n{kind}import torch_armllm\n{kind}"}
    for autoload, layers in (("1", "QuantLinear\n"), ("0", "Linear\nQuantLinear\n")):
        done = in_a_new_process(code[autoload], PYTHONPATH=paths, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
        assert done.stdout == layers
        assert ("Unknown quantization type, got armllm" in done.stderr) == (autoload == "0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int9"}, "unknown quantization scheme 'int9'; there are g32i"),
        ({"head": "int9"}, "unknown quantization scheme 'int9'"),
        ({"overrides": {"mlp": "int9"}}, "unknown quantization scheme 'int9'"),
        ({"method": "best"}, "unknown quantization method 'best'"),
        ({"kv_cache": "int9"}, "kv_cache_dtype must be one of int4, int8"),
        ({"width": 4}, "has no option 'width'"),
        ({"format": 9}, "saved in format 9 and this torch_armllm reads format 1: upgrade"),
        ({"modules": {"lm_head": {"scheme": "g31"}}}, "unknown quantization scheme 'g31'"),
    ],
)
def test_wrong_configuration_is_rejected(options: dict[str, Any], message: str, saved: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ArmInt4Config(**options)
    edit_config(saved, lambda config: config["quantization_config"].update(options))
    with pytest.raises(ValueError, match=message):
        load(saved)


def test_configuration_of_another_model_is_rejected(saved: Path) -> None:
    for modules, message in (
        ({"model.layers.7.mlp.up_proj": {"scheme": "g32i"}}, "does not have: config.json belongs to another"),
        ({"model.norm": {"scheme": "g32i"}}, "a LlamaRMSNorm cannot be packed"),
        (None, "has no 'modules': save the model again"),
    ):
        edit_config(saved, lambda config, m=modules: config["quantization_config"].update(modules=m))
        with pytest.raises(ValueError, match=message):
            load(saved)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "float"])
def test_damaged_files_are_named(packed: bool, saved: Path, tmp_path: Path) -> None:
    folder, options = saved, {}
    if not packed:
        folder, options = tmp_path / "float", {"quantization_config": ArmInt4Config()}
        tiny("llama").save_pretrained(folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    weight = "model.layers.0.mlp.up_proj.weight" + ("_packed" if packed else "")

    for damaged in (whole[:-100], whole[:200], b"\0" * 64 + whole[64:], b""):
        file.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"{file} is damaged or cut short .*: copy or download it again"
        ):
            load(folder, **options)
    file.write_bytes(whole)
    rewrite(folder, lambda state: state.pop(weight))
    with pytest.raises(ValueError, match=f"the checkpoint has no {weight}: a file is missing"):
        load(folder, **options)
    file.write_bytes(whole)
    rewrite(folder, lambda state: state.update({weight: state[weight][:-1].clone()}))
    with pytest.raises(
        ValueError, match=f"{weight} has the shape .* config.json belongs to another checkpoint"
    ):
        load(folder, **options)
    if not packed:
        file.write_bytes(whole)
        rewrite(folder, lambda state: state[weight][3].fill_(float("inf")))
        with pytest.raises(ValueError, match=r"weight of model.layers.0.mlp.up_proj holds inf at \(3, 0\)"):
            load(folder, **options)
    file.write_bytes(whole)
    assert logits(load(folder, **options)).isfinite().all()


def test_other_devices_are_rejected(saved: Path) -> None:
    with pytest.raises(ValueError, match="runs on the CPU; device_map asks for cuda:0"):
        load(saved, device_map={"": "cuda:0"})
    assert torch_armllm.is_patched(load(saved, device_map="auto"))


@torch.no_grad()
def test_saving_warns_of_rounded_rotary_frequencies(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "float")
    rounded = tiny("llama", torch.bfloat16)
    quantize(rounded, Recipe(importance=False), progress=False)
    with pytest.warns(UserWarning, match=r"rotary_emb.inv_freq is torch.bfloat16.*from_pretrained\(dtype="):
        rounded.save_pretrained(tmp_path / "rounded")
    model = load(tmp_path / "float", dtype=torch.bfloat16)
    quantize(model, Recipe(importance=False), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save_pretrained(tmp_path / "packed")
    torch_armllm.patch(model, progress=False)
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))
