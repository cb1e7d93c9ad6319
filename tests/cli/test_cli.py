"""The command line on tiny checkpoints, `env`, and the arithmetic of the benchmarks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_armllm
from tests.support import tiny_server
from tests.support.models import tiny
from torch_armllm.benchmark.latency import Clock, measure, step_bytes, weight_bytes
from torch_armllm.cli.main import main
from torch_armllm.engine.reports import diagnostics
from torch_armllm.ops import variants
from torch_armllm.quant.inplace import quantize
from torch_armllm.system import host


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    tiny("llama").save_pretrained(place)
    return place


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "options",
    [["--quantization", "int4"], ["--quantization", "none"], ["--engine", "transformers"]],
    ids=lambda o: o[1],
)
def test_bench_latency_prints_one_line_per_batch_size(
    options: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "latency", str(checkpoint), "--prompt-len", "5", "--new-tokens", "4"]
    command += ["--dtype", "float32", "--batch-size", "1,3", "--repeats", "1", "--json"]
    assert main(command + options) == 0
    found = lines(capsys.readouterr().out)
    assert [line["batch_size"] for line in found] == [1, 3]
    for line in found:
        assert line["engine"] == ("transformers" if "transformers" in options else "armllm")
        assert line["quant"] == ("int4" if "int4" in options else "none")
        for name in ("prefill_tok_s", "decode_tok_s", "weight_bytes", "peak_rss_bytes"):
            assert float(str(line[name])) > 0


def test_bench_latency_compares_with_transformers(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "latency", str(checkpoint), "--prompt-len", "5", "--new-tokens", "4", "--json"]
    assert main([*command, "--compare", "--dtype", "float32"]) == 0
    ours, theirs = lines(capsys.readouterr().out)
    assert (ours["engine"], theirs["engine"]) == ("armllm", "transformers")
    ratio = float(str(ours["decode_tok_s"])) / float(str(theirs["decode_tok_s"]))
    assert ours["decode_ratio"] == pytest.approx(ratio, abs=0.02)
    assert "decode_ratio" not in theirs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    model = tiny("llama")
    torch_armllm.patch(model, "int4", progress=False)
    model.save_pretrained(place)
    return place


def test_bench_latency_profiles_a_quantized_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "latency", str(saved), "--prompt-len", "5", "--dtype", "float32"]
    assert main([*command, "--profile"]) == 0
    assert "attention" in capsys.readouterr().out
    for options, remedy in (
        (["--quantization", "none"], "leave out --quantization none"),
        (["--engine", "transformers"], "leave out --compare and --engine"),
        (["--compare"], "leave out --compare and --engine"),
    ):
        assert main([*command, *options]) != 0
        assert remedy in capsys.readouterr().err


def test_no_bar_is_drawn_where_the_output_is_no_terminal(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_armllm", "bench", "latency", str(checkpoint)]
    options = ["--prompt-len", "3", "--new-tokens", "3", "--repeats", "1"]
    found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "\r" not in found.stderr and "%|" not in found.stderr


def test_bench_latency_as_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "latency", str(checkpoint), "--prompt-len", "3", "--new-tokens", "3"]
    assert main([*command, "--engine", "transformers", "--repeats", "1", "--threads", "1"]) == 0
    assert "batch   1: prefill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "latency", "--batch-size", "1,x"], "positive integers"),
        (["bench", "latency", "--compare", "--engine", "transformers"], "leave out --engine"),
        (["bench", "latency", "."], "no config.json"),
        (["demo", "/nowhere/at-all"], "/nowhere/at-all"),
    ],
)
def test_user_errors_print_one_line_and_no_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "torch-armllm: error:" in error
    assert message in error


def test_env_describes_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = lines(capsys.readouterr().out)[0]
    assert found["torch"] == torch.__version__
    assert found["selected"] in found["runnable"]  # type: ignore[operator]
    assert found["kernels"]["linear"]["variant"] in found["variants"]  # type: ignore[index,operator]
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "selected" in text
    assert all(len(line) <= 80 for line in text.splitlines() if len(line.split()) > 2)
    lines_unwrapped = re.sub("\n +", " ", text).splitlines()
    linear = next(line for line in lines_unwrapped if line.startswith("linear "))
    assert variants.machine().families["linear"].why in linear


def test_every_kernel_family_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with variants.use("scalar"):
        families = variants.machine().families
    for choice in families.values():
        assert choice.variant == "scalar"
        assert choice.why.startswith("plain C++; ")
        assert choice.why.endswith(" not selected")


def test_numa_nodes_and_cpu_limits(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    for node, cpus in (("node0", "0-3\n"), ("node1", "\n"), ("node10", "8-11\n"), ("node2", "4-7\n")):
        write(f"node/{node}/cpulist", cpus)
    assert list(host.numa_nodes(tmp_path / "node").items()) == [
        ("node0", "0-3"),
        ("node2", "4-7"),
        ("node10", "8-11"),
    ]
    assert host.numa_nodes(tmp_path / "nowhere") == {}
    write("node/node2/meminfo", "Node 2 MemTotal:       2048 kB\nNode 2 MemFree:        1024 kB\n")
    assert host.node_memory(tmp_path / "node") == {"node2": 2 << 20}
    assert host.node_memory(tmp_path / "nowhere") == {}
    write("v2/a/cpu.max", "250000 100000\n")
    write("v2/a/b/cpu.max", "max 100000\n")
    assert host.cpu_limit(tmp_path / "v2", "0::/a/b\n") == 2.5
    assert host.cpu_limit(tmp_path / "v2", "0::/\n") is None
    write("v1/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write("v1/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write("v1/cpu,cpuacct/x/cpu.cfs_quota_us", "150000\n")
    write("v1/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n")
    assert host.cpu_limit(tmp_path / "v1", "5:cpuset:/x\n4:cpu,cpuacct:/x\n") == 1.5
    assert host.cpu_limit(tmp_path / "v1", "4:cpu,cpuacct:/y\n") is None


def test_warnings_name_two_openmp_runtimes() -> None:
    line = "7f-8f r-xp 0 08:01 1 {}"
    maps = "\n".join(
        line.format(f) for f in ("/a/libgomp.so.1", "/b/libgomp.so.1", "/a/libgomp.so.1", "/c/libc.so")
    )
    found = diagnostics.describe()
    found["openmp"] = host.openmp_runtimes(maps)
    assert found["openmp"] == ["/a/libgomp.so.1", "/b/libgomp.so.1"]
    found.update(runnable=["best", "scalar"], selected="scalar", cores=1, threads=4)
    told = " ".join(diagnostics.warnings(found))
    assert "2 OpenMP runtimes" in told
    assert "best is the best here" in told
    assert "OMP_NUM_THREADS=1" in told
    found.update(cores=8, cpu_limit=2.5)
    assert "OMP_NUM_THREADS=2" in " ".join(diagnostics.warnings(found))


def test_step_bytes_equal_the_bytes_read_per_step() -> None:
    model = tiny("llama")
    embeddings = model.get_input_embeddings().weight
    assert step_bytes(model, 1) == weight_bytes(model) - embeddings.nbytes
    tied = tiny("llama", tie_word_embeddings=True)
    assert step_bytes(tied, 1) == weight_bytes(tied)
    shared = tiny("llama", torch.bfloat16, tie_word_embeddings=True)
    quantize(shared, progress=False)
    assert step_bytes(shared, 1) == weight_bytes(shared) - shared.get_input_embeddings().rest.nbytes
    moe = tiny("mixtral")
    experts = sum(p.nbytes for name, p in moe.named_parameters() if ".experts." in name)
    idle = experts - (step_bytes(moe, 1) - (weight_bytes(moe) - experts - embeddings.nbytes))
    assert idle == pytest.approx(experts * 6 / 8, rel=0.01)
    assert step_bytes(moe, 64) > 0.99 * (weight_bytes(moe) - embeddings.nbytes)
    before = step_bytes(moe, 1)
    quantize(moe, progress=False)
    assert step_bytes(moe, 1) < before / 4


def test_clock_and_limits_of_measure() -> None:
    clock = Clock()
    clock.times = [0.0, 2.0, 2.5, 3.0, 9.0]
    assert clock.prefill == 2.0
    assert clock.step == 0.5
    with pytest.raises(ValueError, match="new_tokens 2"):
        measure(tiny("llama"), 1, 4, 2)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_server.checkpoint(tmp_path / "model")
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    command = ["serve", str(model), "--prefix-cache-dir", str(folder), "--port", "0"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"prefix_cache_dir = '{folder}' cannot be written: " in said and "Name a folder" in said


def test_models_lists_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "llama", "--json", "--threads", "1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["family"], row["runs"], row["captured"], row["share"]) == ("llama", "plan", True, 1.0)
    assert main(["models", "llama4000"]) == 2
    assert "llama4000" in capsys.readouterr().err
