"""Counted and modeled figures of the Arm kernels: products a cycle, and cycles of recurrent states."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.records import Record
from bench.report import DOCUMENT
from torch_armllm.quant.schemes.registry import DEFAULT

_NAMES = {
    "neoverse-v1": "V1",
    "neoverse-v2": "V2",
    "neoverse-n1": "N1",
    "neoverse-n2": "N2",
    "a64fx": "A64FX",
}


class Figures:
    """Rates of products by their number of rows, and of attention; cycles of the delta rule."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = [r for r in records if "mac_per_cycle" in r]
        self._states = [r for r in records if "cycles_per_elem" in r and r["op"] == "gated_delta_rule"]

    def product(self, core: str, variant: str, rows: float, int8: bool = False) -> float:
        """Return the rate of a linear layer for a number of tokens, interpolated over its logarithm.

        Raises:
            ValueError: nothing was counted for this core and variant.
        """
        op, dtype = ("int8_linear", "i8") if int8 else ("int4_linear", DEFAULT)
        rates = {}
        for r in self._of(op, dtype, core, variant):
            match = re.match(r"M=(\d+) ", r["shape"])
            if match:
                rates[int(match[1])] = float(r["mac_per_cycle"])
        if not rates:
            raise ValueError(f"no products of {dtype} were counted for {core} with {variant}")
        counted_rows = sorted(rates)
        below = max((m for m in counted_rows if m <= rows), default=counted_rows[0])
        above = min((m for m in counted_rows if m >= rows), default=counted_rows[-1])
        if below == above:
            return rates[below]
        part = (rows - below) / (above - below)
        return rates[below] ** (1 - part) * rates[above] ** part

    def attention(self, core: str, variant: str, latent: bool, decode: bool) -> float:
        """Return the rate of attention over a bfloat16 cache.

        Raises:
            ValueError: nothing was counted for this core and variant.
        """
        op, start = ("mla_attention" if latent else "paged_attention"), "decode" if decode else ""
        for r in self._of(op, "bf16", core, variant):
            if r["shape"].startswith("decode") == bool(start):
                return float(r["mac_per_cycle"])
        raise ValueError(f"no {op} was counted for {core} with {variant}")

    def state(self, core: str, decode: bool) -> float:
        """Return the cycles of the gated delta rule an element of the state and a token, with any variant.

        Raises:
            ValueError: nothing was counted for this core.
        """
        for r in self._states:
            if _NAMES.get(r["cpu"], r["cpu"]) == core and r["shape"].startswith("decode") == decode:
                return float(r["cycles_per_elem"])
        raise ValueError(f"no gated_delta_rule was counted for {core}")

    def _of(self, op: str, dtype: str, core: str, variant: str) -> Iterator[Record]:
        key = (op, dtype, core, variant)
        for r in self._records:
            if (r["op"], r["dtype"], _NAMES.get(r["cpu"], r["cpu"]), r["variant"]) == key:
                yield r


def read_records(paths: Sequence[Path]) -> Figures:
    """Return the records of ``make bench-arm``; without any, those in docs/performance/tables.md."""
    if paths:
        return Figures([record for path in paths for record in json.loads(path.read_text())])
    return Figures(list(shown_records(DOCUMENT.read_text())))


def shown_records(text: str) -> Iterator[Record]:
    """Return the records in the tables of products and of recurrent layers, one per core."""
    for row in _rows(text, "arm-products"):
        for core in _NAMES.values():
            if row.get(core):
                yield _keys(row, core) | {"mac_per_cycle": float(row[core])}
    for row in _rows(text, "arm-states"):
        yield _keys(row, row["core"]) | {"cycles_per_elem": float(row["cycles"])}


def _keys(row: dict[str, str], core: str) -> Record:
    shared = {"op": row["op"], "shape": row["shape"], "dtype": row["type"], "variant": row["variant"]}
    return shared | {"cpu": core}


def _rows(text: str, name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table by its header; none if the document has no such table."""
    match = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", text, flags=re.S)
    if match is None:
        return
    lines = [
        [cell.strip() for cell in line.strip(" |").split(" | ")] for line in match[1].strip().splitlines()
    ]
    header = lines[0]
    for cells in lines[2:]:
        yield dict(zip(header, [*cells, *[""] * (len(header) - len(cells))], strict=True))
