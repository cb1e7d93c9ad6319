"""The measurements of the engine, on a model of two layers."""

from __future__ import annotations

import pytest

from bench.engine_overhead import INSIDE, phases, time_every_fifth_step
from bench.engine_steps import step_seconds
from tests.support.engines import generate_token_ids, make_engine
from tests.support.models import token_ids
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.plan.fused_head import FusedHead


def test_phases_are_those_of_full_decode_steps() -> None:
    def span(name: str, ts: float, dur: float, **args: int) -> dict[str, object]:
        return {"name": name, "ph": "X", "ts": ts, "dur": dur, "args": args}

    events = [
        {"name": "process_name", "ph": "M", "args": {"name": "x"}},
        span("step", 0.0, 10.0, tokens=30, drawn=2),
        span("decode", 0.0, 10.0),
        span("step", 20.0, 10.0, tokens=2, drawn=2),
        span("schedule", 20.0, 1.0),
        span("decode", 21.0, 6.0),
        span("head", 27.0, 1.0),
        span("sample", 28.0, 2.0),
        span("step", 40.0, 5.0, tokens=1, drawn=1),
        span("decode", 40.0, 5.0),
    ]
    expected = {"schedule": [1.0], "decode": [6.0], "head": [1.0], "sample": [2.0], "outside_model": [3.0]}
    assert phases(events, 2) == {"step": [10.0], **expected}


def test_timing_every_fifth_step_does_not_change_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    prompts = [token_ids(1, 9, seed=0)[0].tolist()]
    expected = generate_token_ids(make_engine(speculative_config=None), prompts, params)
    monkeypatch.setattr(FusedHead, "run", FusedHead.run)  # restored after the test
    inside = time_every_fifth_step()
    assert generate_token_ids(make_engine(speculative_config=None), prompts, params) == expected
    assert len(inside) == 3  # of 19 fused steps
    assert all(len(parts) == len(INSIDE) and min(parts) > 0 and sum(parts) < 1e6 for parts in inside)


@pytest.mark.parametrize("batch", [1, 3])
def test_decode_step_timing_frees_all_blocks(batch: int) -> None:
    made = make_engine(max_model_len=161)
    assert 0 < step_seconds(made, batch) < 60
    assert not made.has_unfinished_requests()
    assert made.scheduler.blocks.free == made.scheduler.blocks.num_blocks
