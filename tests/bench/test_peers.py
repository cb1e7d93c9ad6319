"""`python -m bench.peers`: the arithmetic of its records, skipped engines, our side on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import case
from bench.gguf_writer import write_random
from bench.peers import __main__ as peers
from bench.peers import process, results, work
from bench.peers.engine_ik import PROGRAMS, IkLlama
from bench.peers.setup import Setup
from bench.peers.shapes import SHAPES, Shape
from bench.peers.work import ALL, Work, chats, decode, do, prefill
from torch_armllm import Recipe


def parsed(arguments: list[str]) -> Namespace:
    return Namespace(**case.parsed(peers.peers, arguments))


def rounds(*rates: float) -> list[dict[str, float]]:
    return [{"tok_s": float(rate)} for rate in rates]


MEASURED = {
    ("1b", "decode-1", "ours"): {"INT4": rounds(60, 90, 80)},
    ("1b", "decode-1", "llama.cpp"): {"flash": rounds(50, 20, 40), "plain": rounds(30)},
    ("1b", "decode-8", "vllm"): {"compiled": rounds(100)},
}


def test_workload_names_round_trip() -> None:
    for each in ALL:
        assert Work.named(each.name) == each
    assert Work.named("decode-1@4096") == Work("decode", 1, context=4096)
    for name in ("decode", "decode-0", "prefill-x", "chat-8"):
        with pytest.raises(ValueError, match="no such work"):
            Work.named(name)


def test_records_hold_every_round_and_compare_medians() -> None:
    found = {(r["work"], r["engine"]): r for r in results.records(MEASURED)}
    ours, llama = found["decode-1", "ours"], found["decode-1", "llama.cpp"]
    assert ours["tok_s"] == [60, 90, 80]
    assert ours["ratio_to_ours"] == 1
    assert llama["tok_s"] == [50, 20, 40]
    assert llama["ratio_to_ours"] == 0.5
    assert found["decode-8", "vllm"]["ratio_to_ours"] is None


def test_best_configuration_has_the_most_rounds() -> None:
    assert results.best({"a": rounds(1, 9), "b": rounds(4)}) == "a"
    assert results.best({"a": rounds(3), "b": rounds(4)}) == "b"


def test_table_contains_ratios_to_peers() -> None:
    lines = results.shown(results.records(MEASURED)).splitlines()
    assert lines[0].split("|")[3].strip() == "ours, tok/s"
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells == ["Llama-3.2-1B", "decode-1", "80.0", "40.0", "", "2", ""]


def test_latency_table_contains_chats_only() -> None:
    assert results.waits(results.records(MEASURED)) == ""
    chat = {("1b", "chats-8", "ours"): {"INT4": [{"ttft_ms": 30.0, "tpot_ms": 4.0, "tok_s": 100.0}]}}
    assert "30.0" in results.waits(results.records(chat))


def test_missing_engine_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.missing("ours", sys.executable) is None
    monkeypatch.setitem(process.REQUIRED, "vllm", ("no_such_module", "the package of it"))
    found = process.missing("vllm", sys.executable)
    assert found == f"vllm is left out, {sys.executable} has no no_such_module: it needs the package of it"


def test_missing_engines_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        peers, "missing", lambda engine, python: "llama is left out" if "llama" in engine else None
    )
    options = parsed(["--engines", "ours,llama.cpp,vllm,openvino"])
    options.vllm_python, options.openvino_python = "/other", "/third"
    pythons = {"ours": sys.executable, "vllm": "/other", "openvino": "/third"}
    assert peers.interpreters(options) == pythons
    assert "llama is left out" in capsys.readouterr().err


def test_ik_llama_is_skipped_without_its_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parsed(["--engines", "ours,ik_llama.cpp", "--ik-bin", str(tmp_path)])
    assert list(peers.interpreters(options)) == ["ours"]
    assert "--ik-bin names no folder with llama-bench, llama-batched-bench" in capsys.readouterr().err
    for program in PROGRAMS:
        (tmp_path / program).touch()
    assert list(peers.interpreters(options)) == ["ours", "ik_llama.cpp"]


def program(path: Path, text: str, status: int = 0) -> None:
    both = f"cat <<END\n{text}\nEND\ncat <<END >&2\n{text}\nEND"
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.calls\n{both}\nexit {status}\n')
    path.chmod(0o755)


def test_ik_llama_is_measured_by_its_programs(tmp_path: Path) -> None:
    program(tmp_path / "llama-bench", 'some log\n[{"n_prompt": 64, "avg_ts": 12.5}]')
    rows = "| PP | TG | B | S_TG t/s |\n|----|----|---|----------|\n| 128 | 32 | 2 | 34.5 |"
    program(tmp_path / "llama-batched-bench", f"some log\n{rows}\n")
    engine = IkLlama(tmp_path / "model.gguf", 3, tmp_path)
    assert engine.measure(Work.named("prefill-64"), "repacked", 1.0) == {"tok_s": 12.5}
    assert engine.measure(Work.named("decode-1"), "as stored", 1.0) == {"tok_s": 12.5}
    assert engine.measure(Work.named("decode-2"), "repacked", 1.0) == {"tok_s": 34.5}
    first, second = (tmp_path / "llama-bench.calls").read_text().splitlines()
    assert "-t 3 -p 64 -n 0" in first
    assert "-rtr 1" in first
    assert "-gp 128,64" in second
    assert "-rtr 0" in second
    with pytest.raises(ValueError, match="cannot measure chats-8"):
        engine.measure(Work.named("chats-8"), "repacked", 1.0)
    program(tmp_path / "llama-bench", "", status=3)
    with pytest.raises(RuntimeError, match="llama-bench .* ended with 3"):
        engine.measure(Work.named("prefill-64"), "repacked", 1.0)


class PagedPipeline:
    """Stand-in for `openvino_genai.ContinuousBatchingPipeline`, which computes the number of its steps."""

    def __init__(self, folder: str, scheduler: Any, device: str, properties: dict[str, Any]) -> None:
        self.properties = properties
        self.handles: list[Any] = []
        self.steps = 0

    def add_request(self, number: int, ids: Any, config: Any) -> Any:
        handle = SimpleNamespace(canceled=False, can_read=lambda: True)
        handle.read = lambda: {0: SimpleNamespace(generated_ids=[self.steps])}
        handle.cancel = lambda: setattr(handle, "canceled", True)
        self.handles.append(handle)
        return handle

    def step(self) -> None:
        self.steps += 1
        self.handles = [handle for handle in self.handles if not handle.canceled]

    def has_non_finished_requests(self) -> bool:
        return bool(self.handles)


class StatefulPipeline:
    """Stand-in for `openvino_genai.LLMPipeline`, which generates the length of its prompt."""

    def __init__(self, folder: str, device: str, **properties: Any) -> None:
        self.properties = properties

    def generate(self, ids: Any, config: Any, streamer: Any) -> None:
        for _ in range(config.max_new_tokens):
            if streamer.write(ids.shape[1]) == "cancel":
                return


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The engine of OpenVINO over stand-ins for its pipelines."""
    genai = SimpleNamespace(
        ContinuousBatchingPipeline=PagedPipeline,
        LLMPipeline=StatefulPipeline,
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        StreamerBase=object,
        StreamingStatus=SimpleNamespace(RUNNING="running", CANCEL="cancel"),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    monkeypatch.delitem(sys.modules, "bench.peers.engine_openvino", raising=False)
    module = import_module("bench.peers.engine_openvino")
    yield module.OpenVino(tmp_path, 2)
    del sys.modules["bench.peers.engine_openvino"]


def test_openvino_has_settings_for_one_sequence_and_for_several(openvino: Any) -> None:
    one, several = (openvino.ways(Work.named(name)) for name in ("decode-1", "decode-8"))
    assert one == ["stateful", "stateful, groups of 128", "paged", "paged, groups of 128"]
    assert several[2:] == ["paged, throughput", "paged, throughput, groups of 128"]
    openvino.prepare(Work.named("decode-8"), several[3])
    assert openvino.current.pipeline.properties == {
        "INFERENCE_NUM_THREADS": 2,
        "PERFORMANCE_HINT": "THROUGHPUT",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128,
    }
    openvino.prepare(Work.named("decode-1"), "stateful")
    assert openvino.current.pipeline.properties["PERFORMANCE_HINT"] == "LATENCY"
    assert openvino.current.pipeline.properties["ATTENTION_BACKEND"] == "SDPA"
    openvino.prepare(Work.named("decode-1"), "paged")
    assert list(openvino.pipelines) == ["stateful", "paged"]


def test_openvino_pipelines_run_step_by_step(openvino: Any) -> None:
    openvino.prepare(Work.named("decode-2"), "paged")
    openvino.start("a", [1, 2, 3], 8)
    openvino.start("b", [4, 5], 8)
    assert openvino.step() == {"a": [1], "b": [1]}
    openvino.stop("a")
    assert openvino.step() == {"b": [2]}
    openvino.stop("b")
    assert not openvino.current.pipeline.handles

    openvino.prepare(Work.named("decode-1"), "stateful")
    openvino.start("c", [1, 2, 3], 2)
    with pytest.raises(RuntimeError, match="one request at a time"):
        openvino.start("d", [1], 2)
    assert [openvino.step() for _ in range(2)] == [{"c": [3]}] * 2
    with pytest.raises(RuntimeError, match="no more tokens"):
        openvino.step()
    openvino.stop("c")


def test_openvino_runs_every_workload(tmp_path: Path) -> None:
    python = os.environ.get("OPENVINO_PYTHON", sys.executable)
    if (why := process.missing("openvino", python)) is not None:
        pytest.skip(f"{why}, and name it by OPENVINO_PYTHON")
    engine = process.EngineProcess("openvino", "tiny", python, 1, tmp_path, tmp_path / "log")
    try:
        for name in ("prefill-64", "decode-1", "decode-2", "chats-2"):
            for way in engine.ask({"ways": name})["ways"]:
                assert engine.ask({"work": name, "way": way, "seconds": 0.01})["tok_s"] > 0
    finally:
        engine.close()


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL_HYBRIDS = {
    "qwen3.5": {
        **SMALL,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "granite4": {
        **SMALL,
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_d_head": 32,
    },
    "lfm2": SMALL,
}


@pytest.mark.parametrize("name", SMALL_HYBRIDS)
def test_files_of_hybrid_models_hold_as_many_weights_as_the_models(name: str, tmp_path: Path) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = Shape(name, name, {**SHAPES[name].config, **SMALL_HYBRIDS[name]})
    write_random(tmp_path / "model.gguf", shape)
    tensors = GGUFReader(tmp_path / "model.gguf").tensors
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config))
    assert sum(t.n_elements for t in tensors) == sum(p.numel() for p in model.parameters())


def test_random_files_take_a_tokenizer_of_another_file(tmp_path: Path) -> None:
    from gguf import GGUFReader, GGUFWriter

    writer = GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "é"])
    writer.add_token_types([1, 3, 1, 6])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(2)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    shape = Shape("tiny", "tiny", {**SHAPES["1b"].config, **SMALL, "num_hidden_layers": 1})
    write_random(tmp_path / "model.gguf", shape, tmp_path / "source.gguf")
    fields, source = (GGUFReader(tmp_path / f"{name}.gguf").fields for name in ("model", "source"))
    copied = {name for name in source if name.startswith("tokenizer.")}
    assert len(copied) == 6 and "tokenizer.ggml.tokens" in copied
    for name in copied:
        assert fields[name].types == source[name].types
        assert fields[name].contents() == source[name].contents(), name


def test_ended_engine_process_raises(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{\"ready\": true}'\n")
    python.chmod(0o755)
    engine = process.EngineProcess("ours", "1b", str(python), 1, tmp_path, tmp_path / "log")
    engine._signal(signal.SIGCONT)
    engine.process.wait()
    with pytest.raises(RuntimeError, match="it has ended; see .*log"):
        engine.ask({"ways": "decode-1"})


def test_engines_have_recipes() -> None:
    from bench.peers.engine_ours import recipe_of

    chosen = "ours,ours:g32i,ours:int4+a16=head,ours-int6,llama.cpp"
    assert parsed(["--engines", chosen]).engines == chosen.split(",")
    assert recipe_of("ours") == Recipe()
    assert recipe_of("ours:int4+a16=head") == Recipe(int16_activations=["head"])
    assert recipe_of("ours:int4+0.05") == Recipe(bits="+0.05")
    assert recipe_of("ours-int6") == Recipe(head="int6")
    assert recipe_of("ours-int6:g32i") == Recipe("g32i", head="int6")
    assert process.missing("ours:g32i", sys.executable) is None


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--engines", "ours:bf16", "ours:bf16: only quantized models"),
        ("--engines", "ours:int9", "unknown scheme 'int9'"),
        ("--engines", "vllm:int4", "vllm:int4: only ours and ours-int6 have variants"),
        ("--engines", "mine:int4", "there is no 'mine'"),
        ("--models", "7b", "there is no '7b'"),
        ("--work", "decode", "no such work: 'decode'"),
    ],
)
def test_unknown_names_are_refused(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed([option, value])
    assert f"argument {option}: {message}" in capsys.readouterr().err


class Clockwork:
    """An engine whose steps take 10 ms; a single step prefills all prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, time_ns=lambda: len(self.prompts))
        monkeypatch.setattr(work, "time", clock)
        self.running: dict[str, int] = {}
        self.prompts: list[list[int]] = []

    def ways(self, work: Work) -> list[str]:
        return ["only"]

    def prepare(self, work: Work, way: str) -> None:
        pass

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        self.running[name] = new_tokens
        self.prompts.append(prompt)

    def step(self) -> dict[str, list[int]]:
        self.now += 0.01
        return {name: [7] for name in self.running}

    def stop(self, name: str) -> None:
        self.running.pop(name, None)


def test_rates_count_computed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Clockwork(monkeypatch)
    assert prefill(engine, 100, 0.05)["tok_s"] == pytest.approx(10_000)
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts) > 3
    assert decode(engine, 4, 16, 0.1)["tok_s"] == pytest.approx(400)
    assert not engine.running


def test_chats_continue_with_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Clockwork(monkeypatch)
    found = chats(engine, 2)
    assert found["ttft_ms"] == pytest.approx(10)
    assert found["tpot_ms"] == pytest.approx(10)
    assert found["tok_s"] == pytest.approx(200)
    first, second = engine.prompts[0], engine.prompts[2]
    assert second[: len(first)] == first
    assert second[len(first)] == 7


@pytest.mark.parametrize("recipe", ["ours", "ours:int4+a16"])
def test_own_engine_runs_every_workload(recipe: str, tmp_path: Path) -> None:
    from bench.peers.engine_ours import load

    engine = load(Setup(recipe, SHAPES["tiny"], 1, tmp_path))
    for name in ("prefill-64", "decode-2", "chats-2"):
        asked = Work.named(name)
        for way in engine.ways(asked):
            engine.prepare(asked, way)
            assert do(engine, asked, 0.01)["tok_s"] > 0
    assert not engine.engine.has_unfinished_requests()


def test_report_writes_records_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = [{"limit": "read", "threads": 1, "gb_s": 30.0}, {"limit": "INT8", "threads": 1, "gops": 900.0}]
    monkeypatch.setattr(peers, "limits", lambda threads: bounds)
    records, picture = tmp_path / "r.json", tmp_path / "p.png"
    options = parsed(["--json", str(records), "--plot", str(picture)])
    peers.report(options, results.records(MEASURED))
    assert len(json.loads(records.read_text())) == 5
    assert picture.stat().st_size > 1000
