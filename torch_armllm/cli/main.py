"""The ``torch-armllm`` command: its parser and error handling."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch_armllm.cli import (
    bench_latency,
    bench_report,
    bench_serve,
    bench_throughput,
    chat,
    demo,
    env,
    eval,
    models,
    quantize,
    serve,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 2 for a user error, 130 for Ctrl-C."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    # after parsing: `--help` must not wait for torch
    import torch

    if options.command != "env":
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if options.threads is not None:
            if options.threads < 1:
                raise ValueError(f"--threads must be at least 1, got {options.threads}")
            torch.set_num_threads(options.threads)
        options.run(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"torch-armllm: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="torch-armllm", description="Fast Hugging Face language models on Arm CPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = [
        demo.add_parser(commands),
        chat.add_parser(commands),
        serve.add_parser(commands),
        quantize.add_parser(commands),
    ]
    bench = commands.add_parser("bench", help="measure latency, throughput or a server").add_subparsers(
        dest="what", required=True
    )
    parsers += [
        bench_latency.add_parser(bench),
        bench_throughput.add_parser(bench),
        bench_serve.add_parser(bench),
        bench_report.add_parser(bench),
    ]
    parsers += [eval.add_parser(commands), env.add_parser(commands), models.add_parser(commands)]
    for command in parsers:
        command.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    return parser


if __name__ == "__main__":
    sys.exit(main())
