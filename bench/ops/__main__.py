"""Times of the ops on this machine, of PyTorch's own ops, and the limits of the machine.

    make bench ARGS="--only linear,moe"

The sides of a comparison run in turn, round after round, in one process; figures are medians.
``JSON=path`` in the environment names the file for the records.
"""

from __future__ import annotations

from typing import Annotated

import torch

from bench.case import run
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


def ops(*, only: Annotated[tuple[str, ...], "sections, with commas between"] = tuple(SECTIONS)) -> None:
    torch.manual_seed(0)
    machine, cpu = variants.machine(), limits.cpu_name()
    records = print_limits(machine.compiled, cpu)
    for name in only:
        measured, family = SECTIONS[name]
        records += measured(machine.families[family].variant, cpu)
    write_json(records)


if __name__ == "__main__":
    run(ops)
