"""Medians and ratios of the measurements, as records and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.peers.shapes import SHAPES
from bench.records import table

Record = dict[str, Any]
"""``engine``, ``model``, ``work``, ``way``, ``tok_s`` by round, ``ratio_to_ours``, and of chats ``ttft_ms``
and ``tpot_ms`` by round; the limits have ``limit``, ``threads`` and ``gb_s`` or ``gops``."""

OURS = "ours"
Rounds = Mapping[tuple[str, str, str], Mapping[str, Sequence[Mapping[str, float]]]]
"""Figures of every round, by model, work, engine and way."""


def best(ways: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the setting with the highest median rate among those measured most often."""
    most = max(map(len, ways.values()))
    full = {way: rounds for way, rounds in ways.items() if len(rounds) == most}
    return max(full, key=lambda way: median(each["tok_s"] for each in full[way]))


def records(measured: Rounds) -> list[Record]:
    """Return a record for each engine, model and workload."""
    results: list[Record] = []
    for (model, work, engine), ways in measured.items():
        way = best(ways)
        figures = {name: [each[name] for each in ways[way]] for name in ways[way][0]}
        results.append({"engine": engine, "model": model, "work": work, "way": way, **figures})
    ours = {(r["model"], r["work"]): median(r["tok_s"]) for r in results if r["engine"] == OURS}
    for r in results:
        mine = ours.get((r["model"], r["work"]))
        r["ratio_to_ours"] = None if mine is None else median(r["tok_s"]) / mine
    return results


def shown(results: Iterable[Record]) -> str:
    """Return a table: for each model and workload the median rates, and our rate over each peer's."""
    rows = [r for r in results if "work" in r]
    engines = sorted({r["engine"] for r in rows}, key=lambda e: (e != OURS, e))
    peers = [engine for engine in engines if engine != OURS]
    lines: dict[tuple[str, str], dict[str, Record]] = {}
    for r in rows:
        lines.setdefault((r["model"], r["work"]), {})[r["engine"]] = r
    body = []
    for (model, work), by in lines.items():
        rates = [median(by[e]["tok_s"]) if e in by else None for e in engines]
        times = [1 / r if e in by and (r := by[e]["ratio_to_ours"]) else None for e in peers]
        body.append([SHAPES[model].title, work, *rates, *times])
    header = ["model", "work", *(f"{e}, tok/s" for e in engines), *(f"× {e}" for e in peers)]
    return table(header, body)


def waits(results: Iterable[Record]) -> str:
    """Return the table of chats' latencies: a line for each model and engine."""
    rows = [
        [
            SHAPES[r["model"]].title,
            r["work"],
            r["engine"],
            *(median(r[f]) for f in ("ttft_ms", "tpot_ms", "tok_s")),
        ]
        for r in results
        if "ttft_ms" in r
    ]
    return table(["model", "work", "engine", "TTFT, ms", "TPOT, ms", "tok/s"], rows) if rows else ""
