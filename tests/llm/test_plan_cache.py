"""Engines restored from the plan cache run without a model and yield the same tokens."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_armllm
from tests.llm.test_llm import tokenizer
from tests.support.models import tiny
from tests.support.planted_files import PLANTED
from tests.support.server_live import NAME, live
from torch_armllm import LLM, Recipe, SamplingParams
from torch_armllm.cli.main import main
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.llm.plan_cache import cache, constants, entry
from torch_armllm.system import extras

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40, [3]]


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ARMLLM_PLAN_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return entry.folder()


def saved(
    family: str,
    place: Path,
    dtype: torch.dtype = torch.bfloat16,
    head: str | None = "int8",
    importance: bool | None = False,
) -> Path:
    model = tiny(family, dtype)
    torch_armllm.quantize(model, Recipe(head=head, importance=importance), progress=False)
    model.save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), progress=False, **settings)


def is_stored(llm: LLM) -> bool:
    return not llm.has_model


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "gemma3_text", "phi3", "gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_plan_yields_the_same_tokens_without_a_model(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model")
    first = load(folder)
    expected = tokens(first)
    assert not is_stored(first)
    second = load(folder)
    assert is_stored(second)
    assert tokens(second) == expected
    assert second.get_tokenizer()("a b")["input_ids"] == first.get_tokenizer()("a b")["input_ids"]
    assert second.get_default_sampling_params() == first.get_default_sampling_params()
    intakes = [llm.llm_engine.preprocessor.max_model_len for llm in (first, second)]
    assert intakes[0] == intakes[1]
    model = second.model
    assert torch_armllm.is_patched(model)
    assert second.model is model


def test_quantize_keeps_the_plan_for_the_first_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plans: Path
) -> None:
    tiny("llama", torch.bfloat16).save_pretrained(tmp_path / "floats")
    tokenizer().save_pretrained(tmp_path / "floats")
    command = ["quantize", str(tmp_path / "floats")]
    assert main([*command, str(tmp_path / "kept"), "--fast"]) == 0
    assert is_stored(load(tmp_path / "kept"))
    stored = len(list(plans.iterdir()))
    monkeypatch.setattr("torch_armllm.llm.loading.kept_plan.free_memory", lambda: 1000)
    assert main([*command, str(tmp_path / "large"), "--fast"]) == 0
    assert len(list(plans.iterdir())) == stored
    assert not is_stored(load(tmp_path / "large"))


def test_ray_for_one_rank_is_refused_also_where_the_plan_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: True)
    folder = saved("llama", tmp_path / "model")
    for _ in range(2):
        with pytest.raises(ValueError, match="give one of them, at least 2"):
            load(folder, distributed_executor_backend="ray")
        load(folder)


def test_norms_with_float32_weights_are_restored(tmp_path: Path) -> None:
    folder = saved("gemma3_text", tmp_path / "model", importance=None)
    norm = "model.layers.0.input_layernorm.weight"
    assert load_file(folder / "model.safetensors")[norm].dtype == torch.float32
    first = load(folder)
    expected = tokens(first)
    second = load(folder)
    assert is_stored(second)
    assert tokens(second) == expected
    logits = []
    for model in (first.model, second.model):
        assert model.state_dict()[norm].dtype == torch.float32
        assert model.dtype == torch.bfloat16
        with torch.no_grad():
            logits.append(model(torch.tensor(PROMPTS[:1])).logits)
    assert torch.equal(*logits)


def test_restored_plan_that_computes_other_values_is_not_used(
    monkeypatch: pytest.MonkeyPatch, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(load(llama))
    rebuild = constants.rebuild
    with monkeypatch.context() as patches:
        patches.setattr(
            constants,
            "rebuild",
            lambda *given: [t * 2 if t.is_floating_point() else t for t in rebuild(*given)],
        )
        second = load(llama)
    assert not is_stored(second)
    assert "its hidden states differ from the stored ones" in caplog.text
    assert tokens(second) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_lm_heads(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", dtype, head=None)
    expected = tokens(load(folder))
    again = load(folder)
    assert is_stored(again)
    assert tokens(again) == expected


def test_other_settings_have_other_plans(llama: Path) -> None:
    for _ in range(2):
        found = [load(llama, kv_cache_dtype=kind) for kind in ("auto", "int8", "float32")]
        kinds = [llm.llm_engine.runner.executor.shape.dtype for llm in found]  # type: ignore[attr-defined]
        assert kinds == [torch.bfloat16, torch.int8, torch.float32]
    assert all(map(is_stored, found))
    assert not is_stored(load(llama, dtype="float32"))


def test_changed_weights_invalidate_the_plan(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    load(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    norm = next(name for name in weights if name.endswith("norm.weight"))
    weights[norm] = weights[norm] * 3
    save_file(weights, file, {"format": "pt"})
    changed = load(folder)
    assert not is_stored(changed)
    again = load(folder)
    assert is_stored(again)
    assert tokens(again) == tokens(changed)


def test_damaged_entry_is_reported_and_rewritten(
    plans: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(load(llama))
    (file,) = plans.glob("*.safetensors")
    whole = file.read_bytes()
    place = whole.index(b'\\"integers\\": [') + 20
    digit = b"1" if whole[place : place + 1] != b"1" else b"2"
    for damaged in (whole[:place] + digit + whole[place + 1 :], whole[:-8] + b"\x01" * 8, whole[:50], b""):
        file.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "torch_armllm"):
            llm = load(llama)
        assert not is_stored(llm)
        assert "no cached plan can be used" in caplog.text
        assert tokens(llm) == expected
        again = load(llama)
        assert is_stored(again)
        assert tokens(again) == expected


@pytest.mark.parametrize("plant", PLANTED)
def test_entry_that_others_planted_is_named_and_not_read(
    plant: Callable[[Path, Path], None], plans: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key: Any = {"folder": str(tmp_path)}
    entry.write(key, {}, {})
    assert entry.read(key) == ({}, {})
    (file,) = plans.iterdir()
    file.rename(tmp_path / "victim")
    plant(file, tmp_path / "victim")
    assert cache.lookup(key) is None
    assert f"{file} is not read, as " in caplog.text


def test_checkpoints_quantized_while_loading_are_not_cached(plans: Path, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    load(tmp_path / "model", skip_tokenizer_init=True)
    assert not plans.exists()


def test_weights_are_compared_a_few_at_a_time(
    plans: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuild, sizes, damaged = constants.rebuild, [], [True]

    def counted(*arguments: Any) -> list[Tensor]:
        rebuilt = rebuild(*arguments)
        sizes.append([tensor.nbytes for tensor in rebuilt])
        if damaged[0] and len(sizes) == 4:
            rebuilt[-1].view(-1).view(torch.uint8)[-1] ^= 1
        return rebuilt

    monkeypatch.setattr(constants, "rebuild", counted)
    monkeypatch.setattr(cache, "_COMPARED_AT_ONCE", most := 20_000)
    load(llama)
    assert len(sizes) == 4 and not plans.exists()
    damaged[0] = False
    sizes.clear()
    load(llama)
    assert len(sizes) == 4 and all(len(few) == 1 or sum(few) <= most for few in sizes)
    assert is_stored(load(llama))


def test_cache_can_be_disabled(plans: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMLLM_PLAN_CACHE", "0")
    assert not is_stored(load(llama))
    assert not is_stored(load(llama))
    assert not plans.exists()


def test_unwritable_cache_folder_is_ignored(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tokens(load(llama)) == tokens(load(llama))


def test_full_disk_leaves_the_model_usable(
    plans: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(entry, "save_file", full)
    with caplog.at_level(logging.INFO, "torch_armllm"):
        assert tokens(load(llama))
    assert "the plan is not cached" in caplog.text and "No space left" in caplog.text
    assert not list(plans.iterdir())


def test_scratch_files_of_killed_processes_are_deleted(plans: Path, llama: Path) -> None:
    plans.mkdir(parents=True)
    old, new = plans / "tmpold", plans / "tmpnew"
    for file in (old, new):
        file.write_text("half an entry")
    os.utime(old, (0, 0))
    load(llama)
    assert not old.exists() and new.exists()


def test_no_home_folder(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME")
    first = load(llama)
    assert not is_stored(first) and tokens(first) == tokens(load(llama))


def served(folder: Path) -> tuple[bool, str, bool, list[float], bool]:
    """Returns a server's replies, and if its model was absent before, between and after them."""
    llm = AsyncLLM(str(folder), progress=False, kv_cache_memory=4 << 20)
    with live(llm) as server, httpx.Client(base_url=f"{server.base}/v1", timeout=60) as client:
        stored = [llm.has_model]
        asked = {"model": NAME, "prompt": "a b", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        text = client.post("/completions", json=asked).json()["choices"][0]["text"]
        stored.append(llm.has_model)
        vector = client.post("/embeddings", json={"model": NAME, "input": "a b"}).json()["data"][0][
            "embedding"
        ]
        return stored[0], text, stored[1], vector, llm.has_model


def test_server_loads_the_model_on_demand(llama: Path) -> None:
    first, again = served(llama), served(llama)
    assert first[0] and not again[0]
    assert first[1] == again[1]
    assert not again[2]
    assert first[3] == again[3]  # vectors come of the model
    assert again[4]


_WITHOUT = """
import sys
from torch_armllm import LLM, SamplingParams
llm = LLM(sys.argv[1], progress=False)
llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
print(sorted({"torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils"} & set(sys.modules)))
"""


def test_cached_plan_needs_no_import_of_transformers(llama: Path) -> None:
    load(llama)
    shown = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(llama)],
        env=os.environ,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert shown.strip() == "[]"
