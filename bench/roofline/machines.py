"""Arm servers of the predictions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One socket.

    Attributes:
        name: product name.
        core: name of the core in the counted figures.
        variant: of the kernels that it runs.
        cores, ghz: of the socket, all of them busy.
        gb_s: 10⁹ bytes a second of its memory by the data sheet: channels × transfers × 8 bytes.
        core_gb_s: bandwidth of one core; assumed, from its outstanding cache-line misses and a latency of
            about 110 ns.
        assumed: values that the maker does not publish.
    """

    name: str
    core: str
    variant: str
    cores: int
    ghz: float
    gb_s: float
    core_gb_s: float
    assumed: str = ""


SHARE = 0.8
"""Fraction of the data sheet's bandwidth that programs reach; STREAM reaches 75 to 90 % here."""
BARRIER_US = 1.5
"""Microseconds from the last tile of a phase to the first of the next on a whole socket; assumed."""

MACHINES = (
    Machine("Graviton3", "V1", "i8mm", 64, 2.6, 307.2, 20),
    Machine("Graviton4", "V2", "i8mm", 96, 2.8, 537.6, 25),
    Machine("Axion C4A", "V2", "i8mm", 72, 3.0, 537.6, 25, "clock, 12 channels of DDR5-5600"),
    Machine("Grace", "V2", "i8mm", 72, 3.1, 500.0, 25, "clock with all cores busy"),
    Machine("Altra Max M128-30", "N1", "dotprod", 128, 3.0, 204.8, 15),
)


def machine_named(name: str) -> Machine:
    """Return the machine with a name.

    Raises:
        ValueError: no machine has this name.
    """
    for machine in MACHINES:
        if machine.name.lower().startswith(name.lower()):
            return machine
    raise ValueError(f"no machine {name!r}; there are {', '.join(machine.name for machine in MACHINES)}")
