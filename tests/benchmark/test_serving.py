"""The serving benchmark on a stand-in server with known times, and its reports of failures."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="needs the extra bench")

from tests.support.server_stand_in import FIRST, GAP, INPUT_TOKENS, StubServer, stub_server  # noqa: E402
from torch_armllm.benchmark.serving.arrivals import LoadRun, arrival_times, run_load  # noqa: E402
from torch_armllm.benchmark.serving.client import Client, Target  # noqa: E402
from torch_armllm.benchmark.serving.events import EventReader  # noqa: E402
from torch_armllm.benchmark.serving.prompts import RandomQuestions, RecordedQuestions  # noqa: E402
from torch_armllm.benchmark.serving.records import Question, Record  # noqa: E402
from torch_armllm.benchmark.serving.results import Spread, percentile, summarize  # noqa: E402
from torch_armllm.benchmark.serving.table import table  # noqa: E402
from torch_armllm.cli.main import main  # noqa: E402

SLACK = 30.0  # seconds that a busy machine may add


@pytest.fixture(scope="module")
def peer() -> Iterator[StubServer]:
    with stub_server() as made:
        yield made


def ask(peer: StubServer, prompt: str, tokens: int = 3, **more: Any) -> Record:
    async def run() -> Record:
        async with Client(Target(peer.base, model="first", **more)) as client:
            return await client.ask(Question(prompt, tokens))

    return asyncio.run(run())


def bench(peer: StubServer, *options: object) -> int:
    command = ["bench", "serve", "--base-url", peer.base, "--output-len", "3", "--input-len", "4"]
    return main([*command, *map(str, options)])


STREAM = "\ufeffid: 1\ndata: a\n\n: aside\n\ndata:b\r\ndata: ü\r\n\r\ndata\ndata: c: d\r\r\nid: e\n\ndata: x"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_in_pieces_of_any_size(size: int) -> None:
    reader = EventReader()
    stream = STREAM.encode()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == ["a", "b\nü", "\nc: d"]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_times_of_one_request(peer: StubServer, endpoint: Any) -> None:
    record = ask(peer, "hello", 4, endpoint=endpoint)
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens) == (INPUT_TOKENS, 4)
    assert FIRST <= record.ttft < FIRST + SLACK  # not the arrival of the role, which is immediate
    assert len(record.itl) == 3
    assert 0 < sum(record.itl) <= record.latency - record.ttft + 1e-6  # a busy client sees the first late
    assert FIRST + 2.9 * GAP < record.latency < FIRST + 3 * GAP + SLACK
    assert record.tpot == pytest.approx((record.latency - record.ttft) / 3)


def test_request_body_and_headers(peer: StubServer) -> None:
    ask(peer, "hello", 2, ignore_eos=True, api_key="secret")
    assert peer.keys[-1] == "Bearer secret"
    assert peer.bodies[-1] == {
        "model": "first",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    ask(peer, "hello", 2)
    assert "ignore_eos" not in peer.bodies[-1]
    assert peer.keys[-1] == ""


def test_chunks_are_counted_without_server_usage(peer: StubServer) -> None:
    record = ask(peer, "uncounted")
    assert (record.prompt_tokens, record.output_tokens, record.error) == (None, 3, None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("refused", "status 400: .*no such thing"),
        ("cut", "ended before the answer"),
        ("garbled", "not JSON"),
        ("error", "in the stream: .*out of memory"),
        ("odd", "another shape"),
    ],
)
def test_failures_are_recorded(peer: StubServer, prompt: str, message: str) -> None:
    record = ask(peer, prompt)
    assert record.error is not None
    assert re.search(message, record.error)


def test_connection_error_is_recorded() -> None:
    record = ask(StubServerAt("http://127.0.0.1:9"), "hello")
    assert record.error


class StubServerAt(StubServer):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base


def test_arrivals_are_a_poisson_process() -> None:
    times = list(islice(arrival_times(4.0, "seed"), 4001))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0
    assert mean == pytest.approx(0.25, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.25**2, rel=0.15)
    assert (
        times[:9] == list(islice(arrival_times(4.0, "seed"), 9)) != list(islice(arrival_times(4.0, "x"), 9))
    )
    assert list(islice(arrival_times(math.inf, "seed"), 3)) == [0, 0, 0]


@pytest.mark.parametrize(("most", "peak"), [(None, 6), (2, 2)])
def test_concurrency_is_limited(most: int | None, peak: int) -> None:
    async def answer(question: Question) -> Record:
        await asyncio.sleep(0.05)
        return Record(0.0, output_tokens=question.output_len)

    done: list[None] = []
    request = [Question("", number) for number in range(6)]
    run = asyncio.run(run_load(answer, request, math.inf, most, "", lambda: done.append(None)))
    assert run.peak == peak
    assert [record.output_tokens for record in run.records] == list(range(6))
    assert len(done) == 6
    assert run.seconds >= 0.05 * 6 / peak - 0.01


def test_metrics_of_known_records() -> None:
    records = [
        Record(10.0, [10.1, 10.2, 10.4], 10.5, prompt_tokens=5, output_tokens=5),
        Record(10.0, [10.3], 10.3, prompt_tokens=2, output_tokens=1),
        Record(11.0, error="gone"),
        Record(11.0, error="gone"),
    ]
    found = summarize(LoadRun(records, 2.0, peak=3), 4.0, None)
    assert (found.completed, found.failed, found.errors) == (2, 2, {"gone": 2})
    assert (found.total_input_tokens, found.total_output_tokens) == (7, 6)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (1, 3, 6.5)
    assert (found.max_output_tokens_per_s, found.max_concurrent_requests) == (4, 3)
    assert found.ttft.mean == pytest.approx(200)
    assert found.ttft.std == pytest.approx(100)
    assert found.ttft.percentiles == pytest.approx({25: 150, 50: 200, 75: 250, 99: 298})
    assert found.tpot.mean == pytest.approx(100)  # one token has no time for the ones after the first
    assert found.itl.median == pytest.approx(150)
    assert found.e2el.mean == pytest.approx(400)
    as_json = found.to_dict()
    assert as_json["p99_ttft_ms"] == pytest.approx(298)
    assert as_json["median_itl_ms"] == pytest.approx(150)
    nothing = summarize(LoadRun(records[2:], 2.0, peak=1), math.inf, 1)
    assert (nothing.completed, nothing.ttft, nothing.to_dict()["request_rate"]) == (0, Spread.of([]), "inf")


def test_percentiles_equal_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted(random.Random(0).random() for _ in range(37))
    for percent in (0, 1, 25, 50, 75, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert percentile([3.0], 99) == 3.0


def test_table_has_the_layout_of_vllm() -> None:
    records = [Record(0.0, [0.1, 0.2], 0.2, prompt_tokens=5, output_tokens=2)]
    lines = table(summarize(LoadRun(records, 2.0, peak=1), 1.5, 8)).splitlines()
    assert lines[:13] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1         ",
        "Failed requests:                         0         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           1.50      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      5         ",
        "Total generated tokens:                  2         ",
        "Request throughput (req/s):              0.50      ",
        "Output token throughput (tok/s):         1.00      ",
        "Peak output token throughput (tok/s):    2.00      ",
        "Peak concurrent requests:                1.00      ",
        "Total Token throughput (tok/s):          3.50      ",
    ]
    assert lines[13:20] == [
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          100.00    ",
        "Median TTFT (ms):                        100.00    ",
        "P25 TTFT (ms):                           100.00    ",
        "P50 TTFT (ms):                           100.00    ",
        "P75 TTFT (ms):                           100.00    ",
        "P99 TTFT (ms):                           100.00    ",
    ]
    assert [line for line in lines[20:] if line.startswith("--")] == [
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "----------------End-to-end Latency----------------",
    ]
    assert lines[-1] == "=" * 50


def test_random_prompts_have_the_requested_length() -> None:
    questions = RandomQuestions(12, 5)
    drawn = questions.draw(3, "0")
    assert drawn == questions.draw(3, "0") != questions.draw(3, "1")
    assert len({str(question.prompt) for question in drawn}) == 3
    assert all(len(str(q.prompt).split()) == 12 and q.output_len == 5 for q in drawn)


def test_random_prompts_have_exact_token_counts(tmp_path: Path) -> None:
    from tests.support.tiny_server import tokenizer

    tokenizer().save_pretrained(tmp_path)
    (question,) = RandomQuestions(9, 5, str(tmp_path)).draw(1, "0")
    assert len(str(question.prompt)) == 9  # that tokenizer's tokens are bytes


def test_recorded_prompts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    request = [{"role": "user", "content": "two"}]
    assert [q.prompt for q in RecordedQuestions(file, 5).draw(3, "")] == ["one", request, "one"]
    assert [q.prompt for q in RecordedQuestions(file, 5, texts_only=True).draw(2, "")] == ["one", "two"]
    file.write_text(json.dumps({"turns": [{"role": "system", "content": "x"}, *request]}))
    with pytest.raises(ValueError, match="--endpoint chat"):
        RecordedQuestions(file, 5, texts_only=True)


def test_several_rates_in_one_run(
    peer: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    before = len(peer.bodies)
    files = ["--json", tmp_path / "a.json", "--plot", tmp_path / "a.svg"]
    assert bench(peer, "--request-rate", 20, "inf", "--num-prompts", 4, "--warmup", 2, *files) == 0
    assert capsys.readouterr().out.count("Serving Benchmark Result") == 2
    request = peer.bodies[before:]
    assert len(request) == 2 + 4 + 4
    assert all(body["ignore_eos"] and body["model"] == "first" for body in request)
    assert len({body["messages"][0]["content"] for body in request}) == 10  # no prefix cache helps
    assert peer.keys[-1] == "Bearer of the environment"
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["model"], found["num_prompts"]) == ("first", 4)
    assert [run["request_rate"] for run in found["runs"]] == [20, "inf"]
    for run in found["runs"]:
        assert (run["completed"], run["total_input_tokens"], run["total_output_tokens"]) == (4, 28, 12)
        assert 1000 * FIRST <= run["p25_ttft_ms"] <= run["mean_e2el_ms"] < 1000 * (FIRST + 2 * GAP + SLACK)
    assert found["runs"][1]["max_concurrent_requests"] == 4
    assert "TTFT" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 5000


def test_failures_are_counted_and_printed(
    peer: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "a.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("fine", "refused", "refused")))
    assert bench(peer, "--prompts", prompts) == 0
    printed = capsys.readouterr()
    assert "Failed requests:                         2" in printed.out
    assert "failed 2 times: status 400" in printed.err
    assert not any(body.get("ignore_eos") for body in peer.bodies[-3:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--request-rate", "0"],
            "--request-rate: '0' is out of range: give a rate above 0, such as 2.5, or inf",
        ),
        (["--request-rate", "1", "nan"], "argument --request-rate: 'nan' is out of range"),
        (["--max-concurrency", "0"], "argument --max-concurrency: '0' is not an integer of at least 1"),
        (["--base-url", "localhost:8000"], "must begin with http"),
        (["--base-url", "http://127.0.0.1:9"], "does not list its models"),
        (["--base-url", "http://127.0.0.1:9", "a"], "does not answer"),
    ],
)
def test_invalid_options_fail(
    peer: StubServer, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(peer, *options) == 2
    assert message in capsys.readouterr().err


def test_plot_without_matplotlib_fails_before_any_request(
    peer: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = len(peer.bodies)
    assert bench(peer, "--plot", "a.png") == 2
    assert "torch_armllm[bench]" in capsys.readouterr().err
    assert len(peer.bodies) == before
