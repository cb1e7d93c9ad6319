"""``torch-armllm bench report``."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from torch_armllm.cli import Subcommands


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "report", help="what this machine reaches on the shapes of well-known models, with random weights"
    )
    parser.add_argument("--shapes", nargs="+", default=["llama-3.2-1b"], help="llama-3.2-1b, …, or all")
    parser.add_argument("--layers", type=int, help="instead of all of a model's")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[512, 2048], help="(512 2048)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 16], help="(1 8 16)")
    parser.add_argument("--context", type=int, default=1024, help="tokens before those decoded (1024)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (3)")
    parser.add_argument("--folder", type=Path, help="keeps the random weights, for another time")
    parser.add_argument("--json", type=Path, help="file for everything that was found, the machine included")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures, and prints a line for each figure."""
    from torch_armllm.benchmark.machine_report import Works, measure_shape, read_bandwidth
    from torch_armllm.benchmark.model_shapes import SHAPES, shape_of
    from torch_armllm.engine.diagnostics import describe, warnings

    for name in ("prompt_len", "batch_size", "context", "rounds"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    names = SHAPES if options.shapes == ["all"] else options.shapes
    for name in names:
        shape_of(name, options.layers)
    works = Works(options.prompt_len, options.batch_size, options.context, rounds=options.rounds)
    machine = describe()
    bandwidth = read_bandwidth() / 1e9
    print(f"{machine['cpu']}, {machine['selected']} kernels, {machine['engine_threads']}", flush=True)
    print(f"memory is read at {bandwidth:.1f} GB/s", flush=True)
    for text in warnings(machine):
        print(f"warning: {text}", flush=True)
    found: dict[str, object] = {"machine": machine, "read_gb_s": round(bandwidth, 2)}
    results: list[dict[str, object]] = []
    left: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = (options.folder or Path(temporary)) / f"{name}-{options.layers or 'all'}"
            try:
                for reached in measure_shape(name, folder, works, options.layers):
                    read = f", weights at {reached.weight_gb_s:.1f} GB/s" if reached.weight_gb_s else ""
                    print(f"{name}: {reached.work:12} {reached.tok_s:9.1f} tok/s{read}", flush=True)
                    results.append(reached.to_dict())
            except (ValueError, MemoryError) as error:
                left[name] = str(error)
                print(f"{name}: left out: {error}", flush=True)
            if options.json is not None:  # after every model: a later one may end the process
                whole = {**found, "results": results, "left_out": left}
                options.json.write_text(json.dumps(whole, indent=1) + "\n")
