"""Prompts of the throughput benchmark, and the command on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.llm.test_llm import tokenizer
from tests.support.models import tiny
from tests.support.stand_in import StubEngine, StubModel
from torch_armllm.benchmark.throughput import random_prompts, read_prompts
from torch_armllm.cli.engine_options import engine_arguments
from torch_armllm.cli.main import build_parser, main
from torch_armllm.llm import base
from torch_armllm.llm.llm import LLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    tiny("llama").save_pretrained(place)
    return place


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(base, "load_engine", lambda *a, **k: (StubEngine(), StubModel(), tokenizer()))
    return LLM("none")


def written(place: Path, name: str, text: str) -> Path:
    (place / name).write_text(text)
    return place / name


def test_prompts_of_files(llm: LLM, tmp_path: Path) -> None:
    lines = written(tmp_path, "a.txt", "one\n\ntwo\n")
    assert read_prompts(lines, None, llm) == ["one", "two"]
    assert read_prompts(lines, 3, llm) == ["one", "two", "one"]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    entries = [{"prompt": "one"}, {"turns": ["Hi", "more"]}, {"turns": messages}]
    found = read_prompts(written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, entries))), None, llm)
    texts = [prompt if isinstance(prompt, str) else prompt["prompt"] for prompt in found]  # type: ignore[call-overload]
    assert texts == ["one", "<user>Hi<answer>", "<user>Hi<assistant>Yes<answer>"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "holds no prompt"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2: an entry needs 'prompt'"),
        ('{"prompt": "a"}\n{', "line 2: "),
        ('{"turns": []}', "line 1: an entry needs"),
    ],
)
def test_files_without_prompts(llm: LLM, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(written(tmp_path, "a.jsonl", text), None, llm)


def test_random_prompts_are_the_same_each_time() -> None:
    prompts = random_prompts(3, 5, 10)
    assert prompts == random_prompts(3, 5, 10) != random_prompts(3, 5, 10, seed=1)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert all(0 <= token < 10 for prompt in prompts for token in prompt)  # type: ignore[operator]


def test_bench_throughput(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "throughput", str(checkpoint), "--num-prompts", "5", "--input-len", "9"]
    command += ["--output-len", "4", "--max-num-seqs", "2", "--max-model-len", "64"]
    assert main([*command, "--json", "--n", "2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["num_requests"], found["prompt_tokens"], found["output_tokens"]) == (5, 45, 40)
    assert (found["max_num_seqs"], found["dtype"]) == (2, "auto")
    assert found["total_tok_s"] == pytest.approx(found["prompt_tok_s"] + found["output_tok_s"], abs=0.01)
    assert found["steps"] >= 20  # two sequences at once
    assert main(command) == 0
    told = capsys.readouterr()
    assert "5 requests in " in told.out
    assert "Processed prompts" not in told.err  # no bar where the output is no terminal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "argument --num-prompts: '0' is not an integer of at least 1"),
        (["--prompts", "/nowhere/at-all.txt"], "/nowhere/at-all.txt"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_invalid_options_of_bench_throughput(
    llm: LLM, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", "none", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_a_measurement_without_a_traceback(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(base, "load_engine", interrupted)
    assert main(["bench", "throughput", "none"]) == 130
    assert capsys.readouterr().err == "\n"


def test_engine_options() -> None:
    def parsed(*arguments: str) -> dict[str, object]:
        return engine_arguments(build_parser().parse_args(["chat", "none", *arguments]))

    assert parsed() == {"dtype": "auto", "quantization": "auto", "max_num_seqs": 1}
    found = parsed(
        "--kv-cache-memory", "2GiB", "--no-enable-prefix-caching", "--quantization", "none", "--threads", "2"
    )
    assert found["kv_cache_memory"] == 2 << 30
    assert (found["enable_prefix_caching"], found["quantization"], found["threads"]) == (False, None, 2)
    assert parsed("--kv-cache-memory", "0.25")["kv_cache_memory"] == 0.25
    assert parsed("--kv-cache-memory", "500MB")["kv_cache_memory"] == 500_000_000
    assert parsed("--kv-cache-memory", "1000000")["kv_cache_memory"] == 1_000_000
    assert parsed("--speculative-config", '{"method": "ngram"}')["speculative_config"] == {"method": "ngram"}
    for wrong in (["--kv-cache-memory", "much"], ["--speculative-config", "ngram"]):
        with pytest.raises(SystemExit):
            parsed(*wrong)
