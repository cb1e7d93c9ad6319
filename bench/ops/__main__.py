"""Times of the ops on this machine, of PyTorch's own ops, and the limits of the machine.

    make bench ARGS="--only linear,moe"

The sides of a comparison run in turn, round after round, in one process; figures are medians.  Tables are
those of docs/performance/tables.md.  ``JSON=path`` in the environment names the file for the records.
"""

from __future__ import annotations

from typing import Annotated

import torch

from bench.case import run
from bench.ops import attention, heads, limits, linear, moe, rows
from bench.records import Record, record, write_json
from bench.report import print_tables, silicon_tables
from torch_armllm.ops import variants

# Each with the kernel family whose variant its records name.
SECTIONS = {
    "linear": (linear.run, "linear"),
    "heads": (heads.run, "linear"),
    "moe": (moe.run, "linear"),
    "attention": (attention.run, "attention"),
    "rows": (rows.run, "norm"),
}


def machine_limits(variant: str, cpu: str) -> list[Record]:
    """Returns the limits of one core and of all cores."""
    records = []
    for threads in sorted({1, torch.get_num_threads()}):
        keys = (f"{threads} threads", variant, cpu)
        int8, bf16 = 2e-9 * limits.int8_peak(threads), 2e-9 * limits.bf16_peak(threads)
        for op, dtype, figures in (
            ("read", "bytes", {"gb_s": limits.bandwidth(threads) / 1e9}),
            ("multiply", "i8", {"gops": int8}),
            ("multiply", "bf16", {"gops": bf16}),
        ):
            records.append(record(op, keys[0], dtype, *keys[1:], **figures))
    return records


def ops(*, only: Annotated[tuple[str, ...], "sections, with commas between"] = tuple(SECTIONS)) -> None:
    torch.manual_seed(0)
    machine, cpu = variants.machine(), limits.cpu_name()
    records = machine_limits(machine.compiled, cpu)
    for name in only:
        measured, family = SECTIONS[name]
        records += measured(machine.families[family].variant, cpu)
    print_tables(silicon_tables(records))
    write_json(records)


if __name__ == "__main__":
    run(ops)
