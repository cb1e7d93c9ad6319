"""Time of a decode step in the engine and in the model, phase by phase.

    python -m bench.engine_overhead [--model smollm2] [--batch 8] [--steps 200] [--sampled] [--final]
        [--anew] [--inside]

Lets so many answers grow side by side and reads the engine's trace.  Prints lines with microseconds of
each phase, of the step, and ``outside_model``: all but the plan (``decode``) and the head.  The first
line has the median of all steps, the second the tenth percentile, which a busy machine disturbs less.  Every
step makes the text of every answer, as streaming does; with ``--final`` none does, as in `LLM.generate`.

With ``--anew`` every other greedy step points the plan at its data anew, which steps of as many answers as
the one before are spared; a third line has what the model takes in steps of both kinds.  With ``--inside``
every fifth greedy step has a clock at each instruction: a line has medians of the sum of instructions, of
the way into the call, of what lies before the first, between them and behind the last; ``framework`` is all
but the instructions, ``outside_model`` included, and ``share`` its part of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.computed import StepResult
from torch_armllm.engine.execution.fused_head import FusedHead
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.llm.loader import load_engine
from torch_armllm.plan.step import StepInputs

MODEL = ("decode", "head")
"""Phases that the model takes; greedy steps have its head in the first of them."""

INSIDE = ("instructions", "entry", "before", "between", "behind")
"""Parts of the model's phase."""


def phases(events: list[dict[str, Any]], batch: int) -> dict[str, list[float]]:
    """Microseconds of each phase, in every step that brought so many answers forward by a token each.

    ``outside_model`` is a step without the phases of `MODEL`.
    """
    steps = [e for e in events if e["name"] == "step" and e["args"]["tokens"] == e["args"]["drawn"] == batch]
    found: dict[str, list[float]] = {"step": [e["dur"] for e in steps]}
    parts = sorted((e for e in events if e["ph"] == "X" and e["name"] != "step"), key=lambda e: e["ts"])
    at = 0
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in steps):
        while at < len(parts) and parts[at]["ts"] < begin:
            at += 1
        outside = end - begin
        while at < len(parts) and parts[at]["ts"] < end:
            name, took = parts[at]["name"], parts[at]["dur"]
            found.setdefault(name, []).append(took)
            outside -= took if name in MODEL else 0.0
            at += 1
        found.setdefault("outside_model", []).append(outside)
    return found


def begin_every_other_step_anew() -> tuple[list[float], list[float]]:
    """Returns where the microseconds of steps go that are run again, and of those that are begun anew."""
    kinds: tuple[list[float], list[float]] = [], []
    run = FusedHead.run

    def timed(self: FusedHead, inputs: StepInputs) -> StepResult:
        anew = len(kinds[0]) > len(kinds[1])
        if anew:
            self._inputs = None
        began = time.perf_counter_ns()
        computed = run(self, inputs)
        kinds[anew].append((time.perf_counter_ns() - began) / 1e3)
        return computed

    FusedHead.run = timed  # type: ignore[method-assign]
    return kinds


def time_every_fifth_step() -> list[list[float]]:
    """Returns where the microseconds of greedy steps go: of those timed, those of each row of `INSIDE`."""
    found: list[list[float]] = []
    run, number = FusedHead.run, itertools.count()

    def timed(self: FusedHead, inputs: StepInputs) -> StepResult:
        if next(number) % 5 != 4:
            return run(self, inputs)
        began = time.monotonic_ns()
        computed, times = self.run_timed(inputs)
        if times is not None:
            *each, first, last = (times.double() / 1e3).tolist()
            instructions, between = (sum(row[column] for row in each) for column in (0, 2))
            found.append([instructions, first[1] - began / 1e3, first[0], between, last[0]])
        return computed

    FusedHead.run = timed  # type: ignore[method-assign]
    return found


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-p 0.95 and a penalty")
    parser.add_argument("--final", action="store_true", help="one output a request, at its end")
    parser.add_argument(
        "--anew", action="store_true", help="every other step points the plan at its data anew"
    )
    parser.add_argument(
        "--inside", action="store_true", help="every fifth step's instructions are timed as well"
    )
    options = parser.parse_args()
    inside = time_every_fifth_step() if options.inside else []
    again, anew = begin_every_other_step_anew() if options.anew else ([], [])
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        config = EngineConfig(
            max_model_len=options.prompt + options.steps + 8, disable_log_stats=True, trace=str(trace)
        )
        engine = load_engine(options.model, progress=False, config=config).engine
        random = Random(0)
        drawn = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1} if options.sampled else {}
        params = SamplingParams(
            **{"temperature": 0.0, **drawn},
            max_tokens=options.steps,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY if options.final else RequestOutputKind.CUMULATIVE,
        )
        for number in range(options.batch):
            prompt = [random.randrange(engine.sampler.vocab_size) for _ in range(options.prompt)]
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        events = json.loads(trace.read_text())
    found = phases(events, options.batch)
    for name, cut in (("median", 50), ("tenth_percentile", 10)):
        micro = {
            phase: round(quantiles(times, n=100)[cut - 1], 1) for phase, times in found.items() if times[1:]
        }
        print(
            json.dumps({"batch": options.batch, "steps": len(found["step"]), "microseconds": name, **micro})
        )
    if anew:
        print(json.dumps({"again": round(median(again), 1), "anew": round(median(anew), 1)}))
    if inside:
        parts = dict(zip(INSIDE, map(median, zip(*inside, strict=True)), strict=True))
        framework = median(found["outside_model"]) + sum(parts.values()) - parts["instructions"]
        shown = {name: round(micro, 1) for name, micro in {**parts, "framework": framework}.items()}
        print(json.dumps({**shown, "share": round(framework / median(found["step"]), 4)}))


if __name__ == "__main__":
    main()
