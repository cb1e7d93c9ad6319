"""Fixture that times an op and reports bytes read and operations per second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ROWS: list[tuple[str, float, float, float]] = []

Measure = Callable[..., Any]


@pytest.fixture
def measure(benchmark: Any, request: pytest.FixtureRequest) -> Measure:
    """Times a function: ``measure(function, read=bytes, operations=count)``; operations include additions."""

    def run(function: Callable[[], Any], read: float = 0, operations: float = 0) -> Any:
        result = benchmark(function)
        if benchmark.stats is not None:
            seconds = benchmark.stats.stats.median
            benchmark.extra_info.update(GBps=read / seconds / 1e9, GOPps=operations / seconds / 1e9)
            name = request.node.nodeid.removeprefix("bench/")
            ROWS.append((name, seconds, read, operations))
        return result

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.section("rates (median)")
    for name, seconds, read, operations in sorted(ROWS):
        line = f"{name:72} {seconds * 1e3:10.3f} ms"
        line += f" {read / seconds / 1e9:8.1f} GB/s" if read else " " * 14
        line += f" {operations / seconds / 1e9:8.1f} GOP/s" if operations else ""
        terminalreporter.write_line(line)
