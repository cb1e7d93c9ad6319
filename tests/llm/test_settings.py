"""Settings of `LLM`: their types, those of vLLM that are refused, revisions, and code that is never run."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.models import tiny
from tests.support.tiny_server import checkpoint
from torch_armllm.checkpoint import hub_snapshot
from torch_armllm.checkpoint.model_config import with_overrides
from torch_armllm.engine import config
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.settings.engine_settings import EngineSettings
from torch_armllm.llm.calls.foreign_settings import CALLS, REASONS
from torch_armllm.llm.llm import LLM
from torch_armllm.llm.loading import load_settings
from torch_armllm.llm.loading.load_settings import LLMSettings, LoadSettings, PoolingSettings
from torch_armllm.quant.recipe import Recipe


@pytest.mark.parametrize(
    ("keywords", "owners"),
    [
        (EngineSettings, [(EngineConfig, config)]),
        (
            LLMSettings,
            [(EngineConfig, config), (LoadSettings, load_settings), (PoolingSettings, load_settings)],
        ),
    ],
)
def test_keywords_have_the_types_of_the_settings(
    keywords: type, owners: list[tuple[type, ModuleType]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_settings, "torch", torch, raising=False)
    monkeypatch.setattr(load_settings, "Recipe", Recipe, raising=False)
    expected = {}
    for owner, module in owners:
        types = typing.get_type_hints(owner, vars(module))
        expected |= {field.name: types[field.name] for field in fields(owner)}
    assert typing.get_type_hints(keywords) == expected


@pytest.mark.parametrize("name", REASONS)
def test_settings_of_vllm_alone_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ValueError) as refused:
        LLM("none", **{name: 1})  # type: ignore[misc]
    assert str(refused.value) == f"{name}=1 is not a setting here: {REASONS[name]}"
    assert name not in {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize("quantization", ["auto", "int8", None])
def test_the_log_says_that_weights_are_quantized(
    tmp_path: Path, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_armllm"):
        LLM(str(checkpoint(tmp_path)), quantization=quantization, progress=False)
    told = [record.getMessage() for record in caplog.records if "quantizing" in record.getMessage()]
    scheme = {"auto": "int4"}.get(str(quantization), quantization)
    expected = f"quantizing the weights to {scheme}; quantization=None keeps them as they are"
    assert told == ([] if quantization is None else [expected])
    assert caplog.records[0].getMessage() == expected or quantization is None


def test_code_of_a_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError) as refused:
        LLM("none", trust_remote_code=True)
    assert str(refused.value) == (
        "trust_remote_code=True is refused: code of a checkpoint is never run: leave it out, and load a "
        "model whose class is in transformers"
    )


def test_memory_under_the_name_of_vllm(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path))
    llm = LLM(folder, kv_cache_memory_bytes=1 << 20, trust_remote_code=False, progress=False)
    assert llm.kv_bytes <= 1 << 20
    with pytest.raises(ValueError) as refused:
        LLM(folder, kv_cache_memory_bytes=1 << 20, kv_cache_memory=1 << 20)
    assert str(refused.value) == "kv_cache_memory_bytes is vLLM's name of kv_cache_memory: give one of both"


def test_a_revision_is_a_folder_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path)
    asked: list[tuple[Any, Any]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    llm = LLM("somebody/a-model", revision="v1.0", progress=False)
    assert asked == [("somebody/a-model", "v1.0")]
    assert llm.generate([[1, 2]], use_tqdm=False)[0].finished
    with pytest.raises(ValueError) as refused:
        LLM(str(folder), revision="v1.0")
    assert str(refused.value) == (
        f"revision='v1.0' is for names on the model hub, and {folder} is on this disk"
    )
    with pytest.raises(ValueError) as refused:
        LLM(llm.model, revision="v1.0")
    assert str(refused.value) == ("revision='v1.0' is for a model that is yet to be loaded: give its name")
    with pytest.raises(FileNotFoundError, match="^/nowhere/at-all does not exist: "):
        hub_snapshot.hub_snapshot("/nowhere/at-all")


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_fields_of_config_json_are_replaced(tmp_path: Path, quantization: str | None) -> None:
    folder = str(checkpoint(tmp_path / "plain"))
    rope = {"rope_theta": 77.0}
    options: dict[str, Any] = {"quantization": quantization, "dtype": "float32", "progress": False}
    llm = LLM(folder, hf_overrides={"max_position_embeddings": 96, "rope_parameters": rope}, **options)
    assert llm.max_model_len == 96
    assert llm.model.config.rope_parameters == {"rope_theta": 77.0, "rope_type": "default"}  # merged
    edited = tmp_path / "edited"
    shutil.copytree(folder, edited)
    fields = json.loads((edited / "config.json").read_text())
    fields["rope_parameters"]["rope_theta"] = 77.0
    fields["max_position_embeddings"] = 96
    (edited / "config.json").write_text(json.dumps(fields))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    found, expected, plain = (
        each.generate([list(range(3, 80))], params, use_tqdm=False)[0].outputs[0].cumulative_logprob
        for each in (llm, LLM(str(edited), **options), LLM(folder, **options))
    )
    assert found == expected != plain


def test_overrides_that_cannot_be_made(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path))
    with pytest.raises(ValueError) as refused:
        LLM(folder, hf_overrides={"num_hidden_layers": 5000}, progress=False)
    assert str(refused.value) == (
        f"num_hidden_layers is 5000 in the configuration of {folder}, and 1 to 1000 is expected"
    )
    with pytest.raises(ValueError) as refused:
        LLM(tiny("llama"), hf_overrides={"max_position_embeddings": 96})
    assert str(refused.value) == "hf_overrides are for a model that is yet to be loaded: give its folder"
    with pytest.raises(ValueError) as refused:
        with_overrides("a.gguf", None, {"max_position_embeddings": 96})
    assert str(refused.value) == "hf_overrides replace fields of config.json, and a.gguf is a single file"


def test_calls_of_vllm_alone_are_refused_with_a_reason(tmp_path: Path) -> None:
    llm = LLM(str(checkpoint(tmp_path)), progress=False)
    for name, reason in CALLS.items():
        with pytest.raises(AttributeError) as refused:
            getattr(llm, name)
        assert str(refused.value) == f"'LLM' object has no attribute {name!r}: {reason}"
    with pytest.raises(AttributeError, match="^'LLM' object has no attribute 'generat'$"):
        llm.generat  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(llm, "collective_rpc")


@pytest.mark.slow
def test_a_type_checker_finds_mistyped_settings(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).resolve().parents[2]
    if not (root / "build/types/torch_armllm").exists():
        pytest.skip("`make types` lays the package out")
    file = tmp_path / "port.py"
    file.write_text("from torch_armllm import LLM\nLLM('m', max_num_seqs=4)\nLLM('m', max_num_seq=4)\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(file)]
    command += ["--no-site-packages", "--ignore-missing-imports"]  # torch's types take longer than ours
    found = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert 'port.py:3: error: Unexpected keyword argument "max_num_seq" for "LLM"' in found.stdout
    assert "port.py:2" not in found.stdout
