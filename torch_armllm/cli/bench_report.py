"""The command ``torch-armllm bench report``."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import COUNTS, NAMES, OUTPUT_FOLDER, add_settings, read_settings
from torch_armllm.system.settings import COUNT, OUTPUT_FILE, setting
from torch_armllm.system.text_layout import labeled


@dataclass(frozen=True)
class _Report:
    """Measurements, and the file that is written."""

    shapes: tuple[str, ...] = setting(("llama-3.2-1b",), NAMES, "model shapes, or all")
    layers: int | None = setting(None, COUNT, "number of layers to measure", none="all of the model's")
    prompt_len: tuple[int, ...] = setting((512, 2048), COUNTS, "prompt tokens")
    batch_size: tuple[int, ...] = setting((1, 8, 16), COUNTS, "number of sequences per decode step")
    context: int = setting(1024, COUNT, "context tokens of a decode step")
    rounds: int = setting(3, COUNT, "number of rounds; the median is reported")
    folder: Path | None = setting(
        None, OUTPUT_FOLDER, "keep the random weights here, for later runs", none="they are not kept"
    )
    json: Path | None = setting(
        None, OUTPUT_FILE, "write all figures and the machine's description to this file", none="no file"
    )


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "report",
        "measure this machine on the shapes of well-known models, with random weights",
        "torch-armllm bench report --shapes llama-3.2-1b --json report.json",
    )
    add_settings(parser, _Report)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures the machine and prints one line per figure."""
    from torch_armllm.benchmark.machine_report import Works, measure_shape, read_bandwidth
    from torch_armllm.benchmark.model_shapes import SHAPES, shape_of
    from torch_armllm.engine.reports.diagnostics import describe, warnings

    chosen = read_settings(options, _Report)
    names = SHAPES if chosen.shapes == ("all",) else chosen.shapes
    for name in names:
        shape_of(name, chosen.layers)
    works = Works(chosen.prompt_len, chosen.batch_size, chosen.context, rounds=chosen.rounds)
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
            folder = (chosen.folder or Path(temporary)) / f"{name}-{chosen.layers or 'all'}"
            try:
                for reached in measure_shape(name, folder, works, chosen.layers):
                    weights = f", weights at {reached.weight_gb_s:.1f} GB/s" if reached.weight_gb_s else ""
                    print(f"{name}: {reached.work:12} {reached.tok_s:9.1f} tok/s{weights}", flush=True)
                    results.append(reached.to_dict())
            except (ValueError, MemoryError) as error:
                left_out[name] = str(error)
                print(labeled(f"{name}: left out:", error, len(name) + 12), flush=True)
            if chosen.json is not None:  # after every model: a later model may end the process
                everything = {**summary, "results": results, "left_out": left_out}
                chosen.json.write_text(json.dumps(everything, indent=1) + "\n")
