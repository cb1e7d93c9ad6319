"""Counts instructions of the Arm kernels under emulation and models their cycles.

    make bench-arm ARGS="--variant i8mm,dotprod --only 'int4_linear.*m=1$' --regions 5"

``make`` builds the driver and runs this.  ``--regions`` prints the regions with most instructions
and cycles.  ``JSON=path`` in the environment names the file for the records.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench.arm.cases import MACHINES, Case, Machine, cases
from bench.arm.counting import Emulator, has_plugins, symbols
from bench.arm.limits import cycles_per_element
from bench.arm.model import Mca, Model, Share
from bench.case import run
from bench.records import Record, record, write_json
from bench.report import arm_tables, print_tables

Result = tuple[Case, Machine, "Measured | str"]


@dataclass
class Measured:
    """Counts of one run, and their modeled cycles."""

    instructions: int
    macs: float
    elements: float
    cycles: dict[str, float]
    limits: dict[str, float]
    """Least cycles of an element, by core; empty where no limit is known."""
    shares: list[Share]


class Bench:
    """The driver, the emulators, and the model."""

    def __init__(self, driver: Path, plugin: Path, qemu: str, sme_qemu: str | None) -> None:
        self.driver = driver
        self.mca = Mca(driver.parent / "mca.json")
        self.emulator = Emulator(qemu, plugin if has_plugins(qemu) else None)
        self.sme_emulator = Emulator(sme_qemu, None) if sme_qemu else None
        self.functions = symbols(driver)

    def measure(self, case: Case, machine: Machine) -> Measured:
        """Counts and models a case; raises RuntimeError with the reason if that is impossible."""
        emulator = self.sme_emulator if machine.cpu == "sme2" else self.emulator
        if emulator is None:
            raise RuntimeError("no QEMU that emulates SME2")
        command = [str(self.driver), case.op, f"variant={machine.variant}", *case.options]
        counts, work = emulator.count(machine.cpu, command)
        cycles, shares = Model(counts, self.functions, self.mca).cycles(machine.cores)
        limits = {core: cycles_per_element(case.work, core, self.mca) for core in machine.cores if case.work}
        return Measured(counts.total, work["macs"], work["elements"], cycles, limits, shares)


def records_of(case: Case, machine: Machine, measured: Measured) -> list[Record]:
    """Return a record for each modeled core; a record without cycles if no core is modeled."""
    records = []
    for core in machine.cores or (machine.cpu,):
        figures: dict[str, float] = {}
        cycles = measured.cycles.get(core)
        if measured.macs:
            figures["insn_per_mac"] = measured.instructions / measured.macs
            if cycles:
                figures["mac_per_cycle"] = measured.macs / cycles
        if measured.elements:
            figures["insn_per_elem"] = measured.instructions / measured.elements
            if cycles:
                figures["cycles_per_elem"] = cycles / measured.elements
            if core in measured.limits:
                figures["limit_per_elem"] = measured.limits[core]
        records.append(
            record(case.op, case.shape, case.dtype, machine.variant, core, case.group_size, **figures)
        )
    return records


def print_regions(measured: Measured, count: int) -> None:
    """Print the regions that hold most instructions and cycles."""
    for share in measured.shares[:count]:
        kinds = " ".join(f"{name} {n / share.instructions:.0%}" for name, n in share.kinds.most_common(7))
        cycles = " ".join(f"{core} {n:.0f}" for core, n in share.cycles.items())
        print(
            f"    {share.instructions / measured.instructions:6.1%} {share.instructions} instructions, "
            f"{share.iterations} iterations; cycles {cycles or 'not modeled'}; {kinds}"
        )
        print(f"           {share.name[:140]}")


def print_failures(results: Sequence[Result]) -> None:
    """Print the cases that could not be counted, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for case, machine, result in results:
        if isinstance(result, str):
            reasons.setdefault(f"{machine.variant} on {machine.cpu}: {result}", []).append(case.name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"not counted: {reason} ({names[0]}{more})", file=sys.stderr)


def arm(
    *,
    driver: Path = Path("build/arm/bench/driver"),
    plugin: Path = Path("build/arm/bench/tbcount.so"),
    qemu: str = "qemu-aarch64",
    sme_qemu: Annotated[str | None, "a QEMU that emulates SME2"] = None,
    variant: Annotated[tuple[str, ...], "only these, with commas between"] = (),
    only: Annotated[str, "regular expression on `op key=value…`"] = "",
    regions: Annotated[int, "number of regions to print for each case"] = 0,
    jobs: int | None = os.cpu_count(),
) -> None:
    bench = Bench(driver, plugin, qemu, sme_qemu)
    selected = [
        (case, machine)
        for case in cases()
        for machine in MACHINES
        if case.family in machine.families
        and re.search(only, case.name)
        and (not variant or machine.variant in variant)
    ]

    def measured(pair: tuple[Case, Machine]) -> Result:
        try:
            return (*pair, bench.measure(*pair))
        except RuntimeError as error:
            return (*pair, str(error))

    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for case, machine, result in pool.map(measured, selected):
            results.append((case, machine, result))
            text = result if isinstance(result, str) else f"{result.instructions} instructions"
            print(f"{machine.variant} on {machine.cpu}: {case.name}: {text}", file=sys.stderr, flush=True)
            if regions and not isinstance(result, str):
                print(f"{machine.variant} on {machine.cpu}: {case.name}")
                print_regions(result, regions)
    bench.mca.save()
    counted = [(c, m, f) for c, m, f in results if not isinstance(f, str)]
    records = [r for c, m, f in counted for r in records_of(c, m, f)]
    print_tables(arm_tables(records))
    print_failures(results)
    write_json(records)
    if not counted:
        sys.exit("nothing could be counted")


if __name__ == "__main__":
    run(arm)
