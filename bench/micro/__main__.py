"""Times of every op alone, in many shapes: milliseconds, GB/s and GOP/s.

    make microbench ARGS="-k moe"

``-k`` is a regular expression on the names of calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median
from typing import Annotated

import torch

from bench.case import Row, run
from bench.micro import attention, linear, recurrent, rows, sparse  # noqa: F401  each adds its calls
from bench.micro.call import CALLS
from bench.ops.timing import by_round, threads


def micro(
    *, k: Annotated[str, "only calls whose name this regular expression finds"] = "", rounds: int = 9
) -> Iterator[Row]:
    for name, make in CALLS:
        if not re.search(k, name):
            continue
        torch.manual_seed(0)
        call = make()
        with threads(call.threads or torch.get_num_threads()):
            times = by_round({name: call.run}, rounds)[name]
        seconds = median(times)
        row = {"call": name, "ms": 1e3 * seconds, "least_ms": 1e3 * min(times)}
        for unit, count in (("gb_s", call.read), ("gop_s", call.operations)):
            row |= {unit: count / seconds / 1e9} if count else {}
        yield row


if __name__ == "__main__":
    run(micro)
