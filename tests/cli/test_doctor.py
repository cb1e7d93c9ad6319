"""`torch-armllm doctor`: findings, remedies and the verdict."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_server import tokenizer
from torch_armllm.cli.main import main
from torch_armllm.engine.reports import checkup
from torch_armllm.engine.reports.checkup import Finding, examine, huge_pages, memory, render, verdict
from torch_armllm.engine.reports.diagnostics import describe


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine on which nothing has to be changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkup, "free_memory", lambda: 13 * 10**9)
    monkeypatch.setattr(checkup, "page_size", lambda: 2 << 20)
    monkeypatch.setattr(checkup, "collapse", lambda tensors: 4 << 20)
    info = describe()
    info.update(openmp=["/a/libgomp.so.1"], runnable=["best", "scalar"], selected="best")
    info.update(cores=4, threads=4, cpu_limit=None, numa={})
    return info


def remedies(info: dict[str, Any]) -> dict[str, str]:
    return {finding.name: finding.remedy for finding in examine(info) if finding.remedy}


def test_a_sound_machine(sound: dict[str, Any]) -> None:
    findings = examine(sound)
    assert remedies(sound) == {}
    assert verdict(findings) == "everything is in order"
    assert [finding.name for finding in findings] == [
        *("torch_armllm", "python", "torch", "transformers", "kernels", "cores", "memory", "huge pages"),
        *("OpenMP", "cache folder", "extras"),
    ]


def test_old_versions(sound: dict[str, Any]) -> None:
    sound.update(torch="2.9.1+cpu", transformers="4.57.0", python="3.9.2")
    assert remedies(sound) == {
        "python": "install Python 3.10 or newer",
        "torch": 'pip install -U "torch>=2.10"',
        "transformers": 'pip install -U "transformers>=5.21.0"',
    }
    texts = {finding.name: finding.text for finding in examine(sound)}
    assert texts["torch"] == "2.9.1+cpu, older than 2.10"


def test_supported_versions_are_those_of_the_project() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    oldest = {name: ".".join(map(str, version)) for name, version in checkup.OLDEST.items()}
    for name in ("torch", "transformers"):
        assert re.search(rf'"{name}>={re.escape(oldest[name])}[",]', text), name
    assert f'requires-python = ">={oldest["python"]}"' in text


def test_cores_kernels_and_openmp(sound: dict[str, Any]) -> None:
    sound.update(threads=8, selected="scalar", openmp=["/a/libgomp.so.1", "/b/libiomp5.so"])
    assert remedies(sound) == {
        "kernels": "kernel variant scalar is in use, best is the best here: unset ARMLLM_ISA",
        "cores": "8 threads share 4 cores: set OMP_NUM_THREADS=4",
        "OpenMP": "2 OpenMP runtimes are loaded (/a/libgomp.so.1, /b/libiomp5.so): threads can end up on one "
        "core; remove the package that brings the second one, or LD_PRELOAD one of them",
    }
    sound.update(threads=4, cpu_limit=2.5, numa={"node0": "0-1", "node1": "2-3"})
    assert "cores" in remedies(sound)
    (cores,) = (finding.text for finding in examine(sound) if finding.name == "cores")
    assert cores.startswith("4 on 2 NUMA nodes, of which the control group grants 2.5; engines take ")


def test_memory() -> None:
    assert memory(13 * 10**9) == Finding(
        "memory", "13.00 GB are free: INT4 models of up to about 20 billion parameters"
    )
    assert memory(10**9) == Finding(
        "memory",
        "1.00 GB are free: INT4 models of up to about 1.5 billion parameters",
        "end other programs, or raise the memory limit of the container or control group",
    )


def test_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "page_size", lambda: 2 << 20)
    monkeypatch.setattr(checkup, "collapse", lambda tensors: 4 << 20)
    assert huge_pages() == Finding("huge pages", "of 2 MB, in use for weights")
    monkeypatch.setattr(checkup, "collapse", lambda tensors: 0)
    assert huge_pages().remedy.startswith("use Linux 6.1 or newer; ")
    monkeypatch.setattr(checkup, "page_size", lambda: 0)
    assert huge_pages().remedy == "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    monkeypatch.setenv("ARMLLM_HUGE_PAGES", "0")
    assert huge_pages() == Finding("huge pages", "off by ARMLLM_HUGE_PAGES=0", "unset ARMLLM_HUGE_PAGES")


def test_a_cache_folder_that_cannot_be_written(
    sound: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert remedies(sound) == {"cache folder": "set XDG_CACHE_HOME to a folder that can be written"}


def test_render() -> None:
    findings = [Finding("memory", "much"), Finding("cores", "few", "buy more")]
    assert render(findings) == (
        "  memory        much\n! cores         few\n                -> buy more\n\n1 thing to change: cores"
    )


def test_the_command(sound: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("torch_armllm.engine.reports.diagnostics.describe", lambda: sound)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\n\neverything is in order\n")
    sound["threads"] = 8
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "1 thing to change: cores"
    assert found["env"]["torch"] == sound["torch"]
    assert [finding["name"] for finding in found["findings"] if not finding["ok"]] == ["cores"]


def test_a_chat_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["a call"] == "<tool_call>{…}</tool_call>" and found["fields"] == "name, arguments"
    assert main(["doctor", str(tmp_path)]) == 0
    assert "parallel calls  true" in capsys.readouterr().out
