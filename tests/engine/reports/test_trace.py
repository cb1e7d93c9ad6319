"""Step traces: the file is valid at any moment, and phases lie inside their steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import generate_token_ids, make_engine
from tests.support.models import token_ids
from torch_armllm.engine.reports.trace import NO_TRACE, TraceFile
from torch_armllm.engine.sampling_params import SamplingParams

PHASES = ["schedule", "prepare", "prefill", "head", "sample", "detokenize", "finish"]


def spans(file: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text()) if event["ph"] == "X"]


def test_trace_file_is_valid_after_every_step(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    trace = TraceFile(file).track("engine")
    assert spans(file) == []
    for number in range(1, 4):
        trace.begin()
        trace.mark("one")
        trace.mark("two")
        trace.end(tokens=7)
        found = spans(file)
        assert [event["name"] for event in found] == ["step", "one", "two"] * number
        assert found[-3]["args"] == {"number": number, "tokens": 7}
    step, one, two = found[-3:]
    assert step["ts"] == one["ts"]
    assert one["ts"] + one["dur"] == pytest.approx(two["ts"])
    assert step["dur"] == pytest.approx(one["dur"] + two["dur"])


def test_killed_process_leaves_a_valid_trace_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    program = (
        "import os, signal, sys; from torch_armllm.engine.reports.trace import TraceFile\n"
        "trace = TraceFile(sys.argv[1]).track('engine')\n"
        "for _ in range(5):\n    trace.begin(); trace.mark('one'); trace.end()\n"
        "trace.begin(); trace.mark('lost'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(file)], check=False)
    assert [event["name"] for event in spans(file)] == ["step", "one"] * 5


def test_engine_steps_and_phases_are_traced(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    engine = make_engine(trace=str(file))
    prompts = [token_ids(1, n, seed=n)[0].tolist() for n in (9, 30)]
    generate_token_ids(engine, prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    found = spans(file)
    assert [event["name"] for event in found[:8]] == ["step", *PHASES]
    steps = [event for event in found if event["name"] == "step"]
    assert [step["args"]["tokens"] for step in steps] == [39, 2, 2]
    assert [event["name"] for event in found].count("decode") == 2
    assert {event["pid"] for event in found} == {os.getpid()}
    last = found[-1]
    assert last["ts"] + last["dur"] == pytest.approx(steps[-1]["ts"] + steps[-1]["dur"])


def test_several_engines_share_a_trace_file(tmp_path: Path) -> None:
    """Steps are not interleaved; each is on the track of its thread, and tracks and threads are named."""
    file = tmp_path / "steps.json"
    shared = TraceFile(file)

    def run(name: str) -> None:
        track = shared.track(name)
        for _ in range(200):
            track.begin()
            track.mark("one")
            track.end(tokens=1)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = json.loads(file.read_text())
    named = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(named) == {"a", "b"}
    for tid in named.values():
        own = [event for event in spans(file) if event["tid"] == tid]
        assert [event["name"] for event in own] == ["step", "one"] * 200
        assert [event["args"]["number"] for event in own[::2]] == list(range(1, 201))


def test_null_trace_records_nothing() -> None:
    NO_TRACE.begin()
    NO_TRACE.mark("one")
    NO_TRACE.end(tokens=1)
    with pytest.raises(OSError, match="nowhere"):
        TraceFile("/nowhere/steps.json")
