"""The command line: demo, chat, serve, quantize, eval, models, env, bench latency|throughput|serve|report."""

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
    """Runs a command and returns its exit status: 0, 2 for an error of the user, 130 for Ctrl-C."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    # Only now: `--help` answers at once.
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
    """Everything that the command line understands."""
    parser = argparse.ArgumentParser(
        prog="torch-armllm", description="Fast Hugging Face language models on Arm CPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    added = [
        demo.add_parser(commands),
        chat.add_parser(commands),
        serve.add_parser(commands),
        quantize.add_parser(commands),
    ]
    bench = commands.add_parser("bench", help="measurements").add_subparsers(dest="what", required=True)
    added += [
        bench_latency.add_parser(bench),
        bench_throughput.add_parser(bench),
        bench_serve.add_parser(bench),
        bench_report.add_parser(bench),
    ]
    added += [eval.add_parser(commands), env.add_parser(commands), models.add_parser(commands)]
    for command in added:
        command.add_argument("--threads", type=int, help="cores to use; default: as torch decides")
    return parser


if __name__ == "__main__":
    sys.exit(main())
