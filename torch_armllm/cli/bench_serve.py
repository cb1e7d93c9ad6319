"""The command ``torch-armllm bench serve``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import RATES, TEMPERATURE, WHOLE, add_settings, read_settings
from torch_armllm.cli.workload_options import PROMPTS, Workload
from torch_armllm.system.settings import (
    COUNT,
    INPUT_FILE,
    INTEGER,
    OUTPUT_FILE,
    SECONDS,
    TEXT,
    choice,
    setting,
)

if TYPE_CHECKING:
    from torch_armllm.benchmark.serving.measure import Questions
    from torch_armllm.benchmark.serving.results import ServingResult

_KEY_VARIABLES = ("ARMLLM_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True)
class _Server:
    """The server, and how fast requests are sent to it."""

    base_url: str = setting(
        "http://127.0.0.1:8000", replace(TEXT, shown="URL"), "address of an OpenAI-compatible server"
    )
    endpoint: Literal["chat", "completions"] = setting(
        "chat", choice(("chat", "completions")), "kind of requests to send"
    )
    api_key: str | None = setting(
        None,
        replace(TEXT, shown="KEY"),
        "key of the server",
        none=f"the environment variable {' or '.join(_KEY_VARIABLES)}",
    )
    request_rate: tuple[float, ...] = setting(
        (float("inf"),),
        RATES,
        "requests per second (Poisson arrivals); several are measured in turn; inf: all at once",
    )
    max_concurrency: int | None = setting(
        None, COUNT, "maximum number of requests in flight", none="no limit"
    )


@dataclass(frozen=True)
class _Load(Workload):
    """The requests."""

    prompts: Path | None = setting(None, INPUT_FILE, PROMPTS, none="random words")
    num_prompts: int | None = setting(
        None, COUNT, "number of prompts per rate", none="100; with --prompts: all"
    )
    temperature: float = setting(0.0, TEMPERATURE, "sampling temperature; 0: greedy")
    tokenizer: str | None = setting(
        None,
        replace(TEXT, shown="NAME"),
        "a folder or a hub name, for random prompts of exact length",
        none="a word is a token",
    )


@dataclass(frozen=True)
class _Measurement:
    """The measurement, and the files that are written."""

    warmup: int = setting(1, WHOLE, "number of requests that are sent first and not counted")
    seed: int = setting(0, INTEGER, "random seed of prompts and arrival times")
    timeout: float = setting(600.0, SECONDS, "time without data before a request fails")
    json: Path | None = setting(
        None, OUTPUT_FILE, "write the figures under vLLM's names to this file", none="no file"
    )
    plot: Path | None = setting(
        None,
        OUTPUT_FILE,
        "plot throughput against TTFT and TPOT to this file; needs matplotlib",
        none="no file",
    )


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "serve",
        "measure latency and throughput of a running server",
        "torch-armllm bench serve --base-url http://127.0.0.1:8000 --request-rate 1 2 4 inf",
        "torch-armllm bench serve --prompts questions.jsonl --max-concurrency 8 --json figures.json",
    )
    parser.add_argument(
        "model", nargs="?", help="name of the model in the API (default: the first that the server lists)"
    )
    for owner in (_Server, _Load, _Measurement):
        add_settings(parser, owner)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures each request rate and prints one table per rate."""
    import asyncio

    from torch_armllm.benchmark.serving.client import Target
    from torch_armllm.benchmark.serving.measure import LoadPlan, measure
    from torch_armllm.benchmark.serving.plot import plot
    from torch_armllm.benchmark.serving.table import table
    from torch_armllm.system.extras import require_extra

    server, load, measured = (
        read_settings(options, _Server),
        read_settings(options, _Load),
        read_settings(options, _Measurement),
    )
    if not server.base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must begin with http:// or https://, got {server.base_url}")
    if measured.plot is not None:
        require_extra("matplotlib", "bench", "--plot")
    questions, count = _questions(load, server.endpoint)
    key = server.api_key or next(filter(None, map(os.environ.get, _KEY_VARIABLES)), None)
    target = Target(
        base_url=server.base_url,
        endpoint=server.endpoint,
        model=options.model,
        api_key=key,
        ignore_eos=load.ignores_eos,
        temperature=load.temperature,
        timeout=measured.timeout,
    )
    plan = LoadPlan(
        num_prompts=count,
        rates=server.request_rate,
        max_concurrency=server.max_concurrency,
        warmup=measured.warmup,
        seed=measured.seed,
        progress=True,
    )
    models: set[str] = set()
    results: list[ServingResult] = []

    def report_rate(model: str, result: ServingResult) -> None:
        models.add(model)
        results.append(result)
        print(table(result), flush=True)
        for error, times in result.errors.items():
            print(f"failed {times} times: {error}", file=sys.stderr, flush=True)

    asyncio.run(measure(target, questions, plan, report_rate))
    (model,) = models
    if measured.json is not None:
        settings = {
            "base_url": server.base_url,
            "endpoint": server.endpoint,
            "model": model,
            "prompts": None if load.prompts is None else str(load.prompts),
            "num_prompts": count,
            "input_len": load.input_len if load.prompts is None else None,
            "output_len": load.output_len,
            "ignore_eos": load.ignores_eos,
            "temperature": load.temperature,
            "seed": measured.seed,
        }
        report = {**settings, "runs": [result.to_dict() for result in results]}
        measured.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if measured.plot is not None:
        answered = [result for result in results if result.completed]
        if not answered:
            raise ValueError("no request was completed, so there is nothing to plot")
        plot(answered, f"{model}, {server.base_url}", measured.plot)


def _questions(load: _Load, endpoint: str) -> tuple[Questions, int]:
    from torch_armllm.benchmark.serving.prompts import RandomQuestions, RecordedQuestions

    if load.prompts is None:
        drawn = RandomQuestions(load.input_len, load.output_len, load.tokenizer)
        return drawn, load.num_prompts or 100
    recorded = RecordedQuestions(load.prompts, load.output_len, endpoint == "completions")
    return recorded, load.num_prompts or len(recorded)
