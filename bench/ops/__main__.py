"""Times of the ops on this machine, of PyTorch's own ops, and the limits of the machine.

    make bench ARGS="--only linear,moe"

The sides of a comparison run in turn, round after round, in one process; figures are medians.
``JSON=path`` in the environment names the file for the records.
"""

from __future__ import annotations

import argparse
import platform
import re
from pathlib import Path

import torch

from bench.ops import attention, heads, limits, linear, moe, rows
from bench.records import Record, record, table, write_json
from torch_armllm.ops import variants

# Each with the kernel family whose variant its records name.
SECTIONS = {
    "linear": (linear.run, "linear"),
    "heads": (heads.run, "linear"),
    "moe": (moe.run, "linear"),
    "attention": (attention.run, "attention"),
    "rows": (rows.run, "norm"),
}


def cpu_name() -> str:
    """Returns the CPU's name as the system reports it."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return match[1].strip() if match else platform.machine()


def print_limits(variant: str, cpu: str) -> list[Record]:
    """Prints the limits of one core and of all cores."""
    records, lines = [], []
    for threads in sorted({1, torch.get_num_threads()}):
        read = limits.bandwidth(threads) / 1e9
        int8, bf16 = 2e-9 * limits.int8_peak(threads), 2e-9 * limits.bf16_peak(threads)
        shape = f"{threads} threads"
        records += [
            record("read", shape, "bytes", variant, cpu, gb_s=read),
            record("multiply", shape, "i8", variant, cpu, gops=int8),
            record("multiply", shape, "bf16", variant, cpu, gops=bf16),
        ]
        lines.append([threads, read, int8, bf16])
    print(f"{cpu}: limits of the machine\n")
    print(table(["threads", "read, GB/s", "INT8, GOP/s", "BF16, GFLOP/s"], lines))
    return records


def main() -> None:
    """Runs the requested measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    options = parser.parse_args()
    torch.manual_seed(0)
    machine, cpu = variants.machine(), cpu_name()
    records = print_limits(machine.compiled, cpu)
    for name in options.only.split(","):
        run, family = SECTIONS[name]
        records += run(machine.families[family].variant, cpu)
    write_json(records)


if __name__ == "__main__":
    main()
