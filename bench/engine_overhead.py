"""Time of a decode step in the engine and in the model, phase by phase.

    python -m bench.engine_overhead [--model smollm2] [--batch 8] [--steps 200] [--sampled] [--final]
        [--inside]

Decodes ``--batch`` sequences at once and reads the engine's trace.  Prints lines with the microseconds of
each phase, of the whole step, and of ``outside_model``: everything but the plan (``decode``) and the head.
The first line has the median of all steps.  The second has the tenth percentile, which load on the machine
disturbs less.  Every step detokenizes every output, as streaming does; with ``--final`` no step does, as in
`LLM.generate`.

With ``--inside`` every fifth greedy step is timed instruction by instruction.  Its line has medians: the sum
of the instructions, the entry into the call, and the time before the first instruction, between instructions
and after the last.  ``framework`` is the step without the instructions, ``outside_model`` included; ``share``
is its fraction of a step.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Annotated, Any

from bench.case import Row, run
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.llm.loading.loader import load_engine
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.step import StepInputs, StepResult

MODEL = ("decode", "head")
"""Phases that belong to the model; in greedy steps ``decode`` includes the head."""

INSIDE = ("instructions", "entry", "before", "between", "behind")
"""Parts of the model's phase; ``behind`` is the time after the last instruction."""


def phases(events: list[dict[str, Any]], batch: int) -> dict[str, list[float]]:
    """Returns the microseconds of each phase in every step that decoded one token of ``batch`` sequences.

    ``outside_model`` is the step without the phases of `MODEL`.
    """
    steps = [e for e in events if e["name"] == "step" and e["args"]["tokens"] == e["args"]["drawn"] == batch]
    times: dict[str, list[float]] = {"step": [e["dur"] for e in steps]}
    parts = sorted((e for e in events if e["ph"] == "X" and e["name"] != "step"), key=lambda e: e["ts"])
    at = 0
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in steps):
        while at < len(parts) and parts[at]["ts"] < begin:
            at += 1
        outside = end - begin
        while at < len(parts) and parts[at]["ts"] < end:
            name, took = parts[at]["name"], parts[at]["dur"]
            times.setdefault(name, []).append(took)
            outside -= took if name in MODEL else 0.0
            at += 1
        times.setdefault("outside_model", []).append(outside)
    return times


def time_every_fifth_step() -> list[list[float]]:
    """Times every fifth greedy step; returns the list that receives rows of microseconds as in `INSIDE`."""
    rows: list[list[float]] = []
    whole, number = FusedHead.run, itertools.count()

    def timed(self: FusedHead, inputs: StepInputs) -> StepResult:
        if next(number) % 5 != 4:
            return whole(self, inputs)
        began = time.monotonic_ns()
        computed, times = self.run_timed(inputs)
        if times is not None:
            *each, first, last = (times.double() / 1e3).tolist()
            instructions, between = (sum(row[column] for row in each) for column in (0, 2))
            rows.append([instructions, first[1] - began / 1e3, first[0], between, last[0]])
        return computed

    FusedHead.run = timed  # type: ignore[method-assign]
    return rows


def engine_overhead(
    *,
    model: str = "smollm2",
    batch: int = 8,
    prompt: Annotated[int, "tokens of each prompt"] = 64,
    steps: int = 200,
    sampled: Annotated[bool, "temperature 0.8, top-p 0.95 and a penalty"] = False,
    final: Annotated[bool, "one output per request, at its end"] = False,
    inside: Annotated[bool, "every fifth step's instructions are timed as well"] = False,
) -> Iterator[Row]:
    whole = FusedHead.run
    timed = time_every_fifth_step() if inside else []
    drawn = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1} if sampled else {}
    params = SamplingParams(
        **{"temperature": 0.0, **drawn},
        max_tokens=steps,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY if final else RequestOutputKind.CUMULATIVE,
    )
    try:
        times = phases(_events(model, [prompt] * batch, params), batch)
    finally:
        FusedHead.run = whole  # type: ignore[method-assign]
    for name, cut in (("median", 50), ("tenth_percentile", 10)):
        cuts = {phase: quantiles(each, n=100)[cut - 1] for phase, each in times.items() if each[1:]}
        yield {"batch": batch, "steps": len(times["step"]), "microseconds": name, **cuts}
    if timed:
        parts = dict(zip(INSIDE, map(median, zip(*timed, strict=True)), strict=True))
        framework = median(times["outside_model"]) + sum(parts.values()) - parts["instructions"]
        yield {**parts, "framework": framework, "share": framework / median(times["step"])}


def _events(model: str, prompts: list[int], params: SamplingParams) -> list[dict[str, Any]]:
    """Returns the engine's trace of requests with prompts of so many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        config = EngineConfig(
            max_model_len=prompts[0] + (params.max_tokens or 0) + 8,
            disable_log_stats=True,
            speculative_config=None,
            trace=str(trace),
        )
        engine = load_engine(ModelRequest(model, quantization="int4", progress=False), config).engine
        random = Random(0)
        for number, count in enumerate(prompts):
            ids = [random.randrange(engine.sampler.vocab_size) for _ in range(count)]
            engine.add_request(NewRequest(str(number), ids, params))
        while engine.has_unfinished_requests():
            engine.step()
        events: list[dict[str, Any]] = json.loads(trace.read_text())
    return events


if __name__ == "__main__":
    run(engine_overhead)
