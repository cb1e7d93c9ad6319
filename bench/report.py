"""Writes the records of both benchmarks into the tables of docs/performance/tables.md.

    JSON=build/bench/arm.json make bench-arm
    JSON=build/bench/x86.json make bench
    python -m bench.report --arm build/bench/arm.json --silicon build/bench/x86.json

A table is between ``<!-- table: name -->`` and ``<!-- end -->``; no number in a table is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from bench.case import run
from bench.records import Record, table
from bench.targets import MODELED_TARGETS, TIMED_TARGETS, Target

DOCUMENT = Path(__file__).parents[1] / "docs/performance/tables.md"
ROW_HEADER = ["target", "figure", "goal", "value", "met", "versus"]

SVE_BITS = {"neoverse-v1": 256, "neoverse-v2": 128, "neoverse-n2": 128, "a64fx": 512, "sve512": 512}


def targets(rows: Iterable[Target], records: Sequence[Record]) -> str:
    """Return the table of targets and reached values."""
    return table(ROW_HEADER, (target.row(records) for target in rows))


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _variant(record: Record) -> str:
    """Return the variant's name; for SVE with the counted vector length, which is the core's."""
    name: str = record["variant"]
    return f"{name}, {SVE_BITS[record['cpu']]} bits" if name.startswith("sve") else name


def modeled(records: Sequence[Record], per: str, rate: str, unit: str) -> str:
    """Return instructions and modeled rates: a line per op, shape, dtype and variant; a column per core."""
    chosen = [r for r in records if per in r]
    cores = _unique(r["cpu"] for r in chosen if rate in r)
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for r in chosen:
        key = (r["op"], r["shape"], r["dtype"], _variant(r), r[per])
        lines.setdefault(key, {})[r["cpu"]] = r.get(rate)
    names = [core.removeprefix("neoverse-").upper() for core in cores]
    rows = [[*key, *(line.get(core) for core in cores)] for key, line in lines.items()]
    return table(["op", "shape", "type", "variant", f"instructions/{unit}", *names], rows)


def states(records: Sequence[Record]) -> str:
    """Return cycles beside their limit: a line per op, shape, dtype, variant and core."""
    rows = []
    for r in records:
        cycles, limit = r.get("cycles_per_elem"), r.get("limit_per_elem")
        if cycles is None or limit is None:
            continue
        core = r["cpu"].removeprefix("neoverse-").upper()
        key = [r["op"], r["shape"], r["dtype"], r["variant"], core]
        rows.append([*key, r["insn_per_elem"], cycles, limit, cycles / limit])
    header = ["op", "shape", "type", "variant", "core", "instructions/element", "cycles", "limit", "ratio"]
    return table(header, rows)


def limits(records: Sequence[Record]) -> str:
    """Return the table of the machine's limits."""
    chosen = [r for r in records if r["op"] in ("read", "multiply")]
    rows = [[r["cpu"], r["op"], r["dtype"], r["shape"], r.get("gb_s"), r.get("gops")] for r in chosen]
    return table(["machine", "limit", "type", "threads", "GB/s", "GOP/s"], rows)


def linear(records: Sequence[Record]) -> str:
    """Return the table of GOP/s of every scheme and of the peers."""
    chosen = [r for r in records if r["op"] in ("int4_linear", "int8_linear") and "gops" in r]
    schemes, peers = _unique(r["dtype"] for r in chosen), _unique(r["peer"] for r in chosen)
    rows = []
    for shape in _unique(r["shape"] for r in chosen):
        here = [r for r in chosen if r["shape"] == shape]
        ours = {r["dtype"]: r["gops"] for r in here}
        theirs = {r["peer"]: r["peer_value"] for r in here}
        rows.append([shape, *map(ours.get, schemes), *map(theirs.get, peers)])
    return table(["shape", *schemes, *peers], rows)


def comparison(records: Sequence[Record], ops: Sequence[str], figure: str, unit: str) -> str:
    """Return a table that compares a figure of some ops with that of the peer."""
    rows = []
    for r in records:
        if r["op"] in ops and figure in r and "peer" in r:
            ratio = r[figure] / r["peer_value"]
            rows.append([r["op"], r["shape"], r["dtype"], r[figure], r["peer"], r["peer_value"], ratio])
    return table(["op", "shape", "type", unit, "versus", f"its {unit}", "ratio"], rows)


ROW_OPS = ("rms_norm", "add_rms_norm", "layer_norm", "gated_act", "rope_", "moe_route", "sample")
HEADS = ("int8_heads_linear", "dense_heads_linear")
ATTENTION = ("paged_attention", "mla_attention")


Tables = dict[str, Callable[[], str]]


def arm_tables(records: Sequence[Record]) -> Tables:
    """Return the tables of the modeled cores."""
    without_limit = [r for r in records if "limit_per_elem" not in r]
    return {
        "arm-targets": lambda: targets(MODELED_TARGETS, records),
        "arm-products": lambda: modeled(records, "insn_per_mac", "mac_per_cycle", "MAC"),
        "arm-elements": lambda: modeled(without_limit, "insn_per_elem", "cycles_per_elem", "element"),
        "arm-states": lambda: states(records),
    }


def silicon_tables(records: Sequence[Record]) -> Tables:
    """Return the tables of a machine."""
    return {
        "silicon-targets": lambda: targets(TIMED_TARGETS, records),
        "silicon-limits": lambda: limits(records),
        "silicon-linear": lambda: linear(records),
        "silicon-gemv": lambda: comparison(records, ("int4_linear", "int8_linear"), "gb_s", "GB/s"),
        "silicon-heads": lambda: comparison(records, HEADS, "gops", "GOP/s"),
        "silicon-moe": lambda: comparison(records, ("int4_moe",), "gb_s", "GB/s"),
        "silicon-moe-gops": lambda: comparison(records, ("int4_moe",), "gops", "GOP/s"),
        "silicon-prompt": lambda: comparison(records, ATTENTION, "gops", "GOP/s"),
        "silicon-decode": lambda: comparison(records, ATTENTION, "gb_s", "GB/s"),
        "silicon-rows": lambda: comparison(records, ROW_OPS, "gb_s", "GB/s"),
    }


def print_tables(tables: Tables) -> None:
    """Print the tables that have rows, but not those of targets."""
    for name, write in tables.items():
        text = write()
        if not name.endswith("targets") and text.count("\n") > 1:
            print(f"\n{name}\n\n{text}")


def rendered(text: str, arm: Sequence[Record] | None, silicon: Sequence[Record] | None) -> str:
    """Return the document with new tables; tables without records do not change."""
    writers = arm_tables(arm or ()) | silicon_tables(silicon or ())

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in writers:
            raise ValueError(f"no table is called {name!r}; there are: {', '.join(writers)}")
        if (arm if name.startswith("arm") else silicon) is None:
            return match[0]
        return f"<!-- table: {name} -->\n{writers[name]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", replace, text, flags=re.S)


def report(
    *,
    arm: Annotated[tuple[Path, ...] | None, "records of make bench-arm"] = None,
    silicon: Annotated[tuple[Path, ...] | None, "records of make bench"] = None,
) -> None:
    read = [paths and [r for path in paths for r in json.loads(path.read_text())] for paths in (arm, silicon)]
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(), *read))


if __name__ == "__main__":
    run(report)
