"""A process with one engine and one model that runs a workload for every line of its input.

    python -m bench.peers.worker ENGINE MODEL --threads 2 --cache build/bench/models

Reads lines of JSON, ``{"work": "decode-8", "way": "flash", "seconds": 1}`` or ``{"ways": "decode-8"}``, and
replies to each with a line.  The libraries' own output goes to the error stream.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.setup import Setup, family
from bench.peers.shapes import SHAPES
from bench.peers.work import Engine, Programs, Work, do

ENGINES = {
    "ours": "engine_ours",  # with or without a recipe, as in ours:g32i
    "ours-int6": "engine_ours",
    "llama.cpp": "engine_llama",
    "ik_llama.cpp": "engine_ik",
    "vllm": "engine_vllm",
    "vllm-int4": "engine_vllm",
    "openvino": "engine_openvino",
}


def answer(engine: Engine | Programs, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out the request of one line."""
    if "ways" in request:
        return {"ways": engine.ways(Work.named(request["ways"]))}
    work = Work.named(request["work"])
    if isinstance(engine, Programs):
        return engine.measure(work, request["way"], request["seconds"])
    engine.prepare(work, request["way"])
    return do(engine, work, request["seconds"])


def main() -> None:
    """Load the engine, report that it is ready, and serve requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", help=f"one of {', '.join(ENGINES)}")
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--programs", type=Path, help="folder of the engine's programs")
    options = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        module = import_module(f".{ENGINES[family(options.engine)]}", __package__)
        shape = SHAPES[options.model]
        setup = Setup(options.engine, shape, options.threads, options.cache, options.programs)
        engine = module.load(setup)
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    for line in sys.stdin:
        try:
            say(answer(engine, json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
