from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_armllm.benchmark import machine_report, model_shapes
from torch_armllm.benchmark.machine_report import Works, measure_shape
from torch_armllm.benchmark.model_shapes import SHAPES, shape_of
from torch_armllm.cli.main import main

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_shapes._SHAPES, "llama-3.2-1b", ("llama", SMALL))
    monkeypatch.setattr(machine_report, "READ_BYTES", 1 << 20)


def test_every_workload_is_measured(tmp_path: Path, small: None) -> None:
    works = Works(prompts=(5, 20), batches=(1, 3), context=8, steps=4, rounds=1)
    found = list(measure_shape("llama-3.2-1b", tmp_path / "one", works, layers=1))
    assert [r.work for r in found] == ["prompt 5", "prompt 20", "decode, 1", "decode, 3"]
    assert all(r.tok_s > 0 and r.layers == 1 for r in found)
    assert [r.weight_gb_s is None for r in found] == [True, True, False, False]


def test_model_larger_than_memory_raises(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_report, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="0.0 GB are free"):
        next(measure_shape("llama-3.2-1b", tmp_path, Works()))


def test_command_writes_the_machine_and_results(
    tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    small_work = [
        "--prompt-len",
        "4",
        "--batch-size",
        "2",
        "--context",
        "4",
        "--rounds",
        "1",
        "--layers",
        "1",
    ]
    assert main(["bench", "report", "--shapes", "llama-3.2-1b", *small_work, "--json", str(file)]) == 0
    assert "llama-3.2-1b: decode, 2" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [r["work"] for r in found["results"]] == ["prompt 4", "decode, 2"]
    assert found["read_gb_s"] > 0 and "features" in found["machine"] and found["left_out"] == {}


def test_invalid_options_fail_before_a_model_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", "--shapes", "gpt-5"]) == 2
    assert "gpt-5" in capsys.readouterr().err
    assert main(["bench", "report", "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least one layer"):
        shape_of("llama-3.1-8b", 0)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_configurations_of_transformers(name: str) -> None:
    config = shape_of(name, 3, 1000)
    assert (config.num_hidden_layers, config.vocab_size) == (3, 1000)
