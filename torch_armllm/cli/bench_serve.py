"""The command ``torch-armllm bench serve``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch_armllm.cli import Subcommands

if TYPE_CHECKING:
    from torch_armllm.benchmark.serving.measure import Questions
    from torch_armllm.benchmark.serving.results import ServingResult

_KEY_VARIABLES = ("ARMLLM_API_KEY", "OPENAI_API_KEY")


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command and its options to the parser."""
    parser = commands.add_parser("serve", help="measure latency and throughput of a running server")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="an OpenAI-compatible server")
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="(chat)")
    parser.add_argument("--api-key", help=f"default: the environment variable {' or '.join(_KEY_VARIABLES)}")
    parser.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        default=[float("inf")],
        metavar="R",
        help="requests per second (Poisson arrivals); several are measured in turn; inf: all at once",
    )
    parser.add_argument("--max-concurrency", type=int, help="most requests in flight; default: no limit")
    parser.add_argument(
        "--prompts",
        type=Path,
        help='.jsonl with "prompt" or "turns", or text with a prompt per line; default: random words',
    )
    parser.add_argument("--num-prompts", type=int, help="prompts per rate (100; with --prompts: all)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens per random prompt (128)")
    parser.add_argument("--output-len", type=int, default=128, help="most tokens per completion (128)")
    parser.add_argument(
        "--tokenizer",
        help="a folder or a hub name, for random prompts of exact length; default: a word is a token",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate up to --output-len whatever the model says; default: for random prompts only",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (0)")
    parser.add_argument("--warmup", type=int, default=1, help="requests sent first and not counted (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random prompts and arrival times (0)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds without data before a request fails (600)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures under vLLM's names")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot throughput against TTFT and TPOT; needs matplotlib"
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures each request rate and prints one table per rate."""
    import asyncio

    try:
        from torch_armllm.benchmark.serving.client import Target
        from torch_armllm.benchmark.serving.measure import Plan, measure
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'torch_armllm[bench]'") from error
    from torch_armllm.benchmark.serving.plot import plot
    from torch_armllm.benchmark.serving.table import table
    from torch_armllm.system.extras import require_extra

    _check(options)
    if options.plot is not None:
        require_extra("matplotlib", "bench", "--plot")
    questions, count = _questions(options)
    key = options.api_key or next(filter(None, map(os.environ.get, _KEY_VARIABLES)), None)
    ignore_eos = options.prompts is None if options.ignore_eos is None else options.ignore_eos
    target = Target(
        base_url=options.base_url,
        endpoint=options.endpoint,
        model=options.model,
        api_key=key,
        ignore_eos=ignore_eos,
        temperature=options.temperature,
        timeout=options.timeout,
    )
    plan = Plan(
        num_prompts=count,
        rates=options.request_rate,
        max_concurrency=options.max_concurrency,
        warmup=options.warmup,
        seed=options.seed,
        progress=sys.stderr.isatty(),
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
    if options.json is not None:
        settings = {
            "base_url": options.base_url,
            "endpoint": options.endpoint,
            "model": model,
            "prompts": None if options.prompts is None else str(options.prompts),
            "num_prompts": count,
            "input_len": options.input_len if options.prompts is None else None,
            "output_len": options.output_len,
            "ignore_eos": ignore_eos,
            "temperature": options.temperature,
            "seed": options.seed,
        }
        report = {**settings, "runs": [result.to_dict() for result in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        answered = [result for result in results if result.completed]
        if not answered:
            raise ValueError("no request was completed, so there is nothing to plot")
        plot(answered, f"{model}, {options.base_url}", options.plot)


def _questions(options: argparse.Namespace) -> tuple[Questions, int]:
    from torch_armllm.benchmark.serving.prompts import RandomQuestions, RecordedQuestions

    if options.prompts is None:
        drawn = RandomQuestions(options.input_len, options.output_len, options.tokenizer)
        return drawn, options.num_prompts or 100
    recorded = RecordedQuestions(options.prompts, options.output_len, options.endpoint == "completions")
    return recorded, options.num_prompts or len(recorded)


def _check(options: argparse.Namespace) -> None:
    for name, least in (
        ("num_prompts", 1),
        ("input_len", 1),
        ("output_len", 1),
        ("max_concurrency", 1),
        ("warmup", 0),
    ):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for rate in options.request_rate:
        if not rate > 0:
            raise ValueError(f"--request-rate must be above 0, got {rate:g}")
    if not options.timeout > 0:
        raise ValueError(f"--timeout must be above 0, got {options.timeout:g}")
    if not options.base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must begin with http:// or https://, got {options.base_url}")
