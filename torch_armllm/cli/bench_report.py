"""The command ``torch-armllm bench report``."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli import option_types as types
from torch_armllm.cli.parser import Parser
from torch_armllm.system.text_layout import labeled


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "report",
        "measure this machine on the shapes of well-known models, with random weights",
        "torch-armllm bench report --shapes llama-3.2-1b --json report.json",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["llama-3.2-1b"],
        metavar="NAME",
        help="model shapes, or all",
    )
    parser.add_argument(
        "--layers",
        type=types.positive,
        metavar="N",
        help="number of layers to measure (default: all of the model's)",
    )
    parser.add_argument(
        "--prompt-len",
        type=types.positive,
        nargs="+",
        default=[512, 2048],
        metavar="N",
        help="prompt tokens",
    )
    parser.add_argument(
        "--batch-size",
        type=types.positive,
        nargs="+",
        default=[1, 8, 16],
        metavar="N",
        help="number of sequences per decode step",
    )
    parser.add_argument(
        "--context", type=types.positive, default=1024, metavar="N", help="context tokens of a decode step"
    )
    parser.add_argument(
        "--rounds",
        type=types.positive,
        default=3,
        metavar="N",
        help="number of rounds; the median is reported",
    )
    parser.add_argument(
        "--folder",
        type=types.output_folder,
        metavar="DIR",
        help="keep the random weights here, for later runs (default: they are not kept)",
    )
    parser.add_argument(
        "--json",
        type=types.output_file,
        metavar="FILE",
        help="write all figures and the machine's description to this file (default: no file)",
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures the machine and prints one line per figure."""
    from torch_armllm.benchmark.machine_report import Works, measure_shape, read_bandwidth
    from torch_armllm.benchmark.model_shapes import SHAPES, shape_of
    from torch_armllm.engine.reports.diagnostics import describe, warnings

    names = SHAPES if options.shapes == ["all"] else options.shapes
    for name in names:
        shape_of(name, options.layers)
    works = Works(options.prompt_len, options.batch_size, options.context, rounds=options.rounds)
    machine = describe()
    bandwidth = read_bandwidth() / 1e9
    header = {
        "cpu": machine["cpu"],
        "kernels": machine["selected"],
        "threads": machine["engine_threads"],
        "memory": f"read at {bandwidth:.1f} GB/s",
    }
    rows = [*header.items(), *(("warning", text) for text in warnings(machine))]
    print("\n".join(labeled(name, text, 10) for name, text in rows), flush=True)
    summary: dict[str, object] = {"machine": machine, "read_gb_s": round(bandwidth, 2)}
    results: list[dict[str, object]] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = (options.folder or Path(temporary)) / f"{name}-{options.layers or 'all'}"
            try:
                for reached in measure_shape(name, folder, works, options.layers):
                    weights = f", weights at {reached.weight_gb_s:.1f} GB/s" if reached.weight_gb_s else ""
                    print(f"{name}: {reached.work:12} {reached.tok_s:9.1f} tok/s{weights}", flush=True)
                    results.append(reached.to_dict())
            except (ValueError, MemoryError) as error:
                left_out[name] = str(error)
                print(labeled(f"{name}: left out:", error, len(name) + 12), flush=True)
            if options.json is not None:  # after every model: a later model may end the process
                everything = {**summary, "results": results, "left_out": left_out}
                options.json.write_text(json.dumps(everything, indent=1) + "\n")
