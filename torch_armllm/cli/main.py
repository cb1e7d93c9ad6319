"""The ``torch-armllm`` command: its parser and error handling."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch_armllm._version import __version__
from torch_armllm.cli import (
    add_command,
    bench_latency,
    bench_report,
    bench_serve,
    bench_throughput,
    chat,
    demo,
    doctor,
    env,
    eval,
    models,
    option_types,
    quantize,
    serve,
)
from torch_armllm.cli.parser import Parser
from torch_armllm.system.extras import with_remedy

_BROKEN_PIPE = 141
"""Exit status of a process that SIGPIPE ends, as shells report it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    It is 0, what the command says, 2 for an error of the user, 130 for Ctrl-C, or 141 where nobody reads the
    output any more.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # what is still in the buffer would fail once more when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the words that can follow
        import argcomplete

        argcomplete.autocomplete(parser)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as ended:  # by --help, --version or an error that is printed already
        return int(ended.code or 0)
    if options.command != "env":
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():  # other packages' bars; ours print lines then
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        if getattr(options, "threads", None) is not None:
            import torch

            torch.set_num_threads(options.threads)
        return int(options.run(options) or 0)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return _failed(str(error))
    except ImportError as error:
        return _failed(with_remedy(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _failed(message: str) -> int:
    print(f"torch-armllm: error: {message}", file=sys.stderr)
    return 2


def build_parser() -> Parser:
    """Returns the parser of all commands."""
    parser = Parser(
        prog="torch-armllm",
        description="Fast Hugging Face language models on Arm CPUs.",
        epilog="examples:\n"
        "  torch-armllm demo                        # the bundled model in bfloat16 and in INT4\n"
        "  torch-armllm chat                        # talk to it\n"
        "  torch-armllm quantize MODEL OUT          # a folder that loads at once\n"
        "  torch-armllm serve OUT --port 8000       # an OpenAI-compatible server\n"
        "  torch-armllm doctor                      # what is in the way of speed on this machine",
    )
    parser.add_argument("--version", action="version", version=f"torch_armllm {__version__}")
    parser.set_defaults(run=lambda options: parser.print_help())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    parsers = [
        demo.add_parser(commands),
        chat.add_parser(commands),
        serve.add_parser(commands),
        quantize.add_parser(commands),
    ]
    bench = add_command(commands, "bench", "measure latency, throughput or a server")
    bench.set_defaults(run=lambda options: bench.print_help())
    measured = bench.add_subparsers(dest="what", metavar="COMMAND", title="commands")
    parsers += [
        bench_latency.add_parser(measured),
        bench_throughput.add_parser(measured),
        bench_serve.add_parser(measured),
        bench_report.add_parser(measured),
    ]
    parsers += [
        eval.add_parser(commands),
        doctor.add_parser(commands),
        env.add_parser(commands),
        models.add_parser(commands),
    ]
    for command in parsers:
        command.add_argument(
            "--threads",
            type=option_types.positive,
            metavar="N",
            help="number of CPU threads (default: torch's choice; engines take one per physical core)",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
