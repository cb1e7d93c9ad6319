"""CPUs, NUMA nodes, free memory and limits of this machine and process, as Linux reports them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

OPENMP = ("libgomp", "libiomp5", "libomp")


def openmp_runtimes(maps: str | None = None) -> list[str]:
    """Returns the files of the OpenMP runtimes that this process has loaded.

    Args:
        maps: text in the format of ``/proc/self/maps``; None: that file.
    """
    if maps is None:
        maps = _read(Path("/proc/self/maps"))
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if Path(file).name.startswith(OPENMP))


def cpu_name() -> str:
    """Returns the processor's name as reported by the kernel."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("model name", "cpu model", "hardware"):
            return value.strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Returns the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores(
    root: Path = Path("/sys/devices/system/cpu"), allowed: set[int] | None = None
) -> list[tuple[int, ...]]:
    """Returns the physical cores that this process may use, each as its allowed CPUs.

    Args:
        root: the folder of sysfs that describes CPUs.
        allowed: CPUs that the process may run on; None: its affinity.
    """
    if allowed is None:
        can_ask = hasattr(os, "sched_getaffinity")
        allowed = os.sched_getaffinity(0) if can_ask else set(range(os.cpu_count() or 1))
    cores: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        topology = root / f"cpu{cpu}" / "topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        cores.setdefault(siblings.strip() or str(cpu), []).append(cpu)
    return [tuple(core) for core in cores.values()]


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> dict[str, str]:
    """Returns the CPUs of each NUMA node that has any, as ``{"node0": "0-31"}``; empty if unknown."""
    nodes = {}
    for file in sorted(root.glob("node[0-9]*/cpulist"), key=lambda f: int(f.parent.name[4:])):
        cpus = _read(file).strip()
        if cpus:
            nodes[file.parent.name] = cpus
    return nodes


def node_memory(root: Path = Path("/sys/devices/system/node")) -> dict[str, int]:
    """Returns the bytes of memory of each NUMA node, as far as they are known."""
    memory = {}
    for file in root.glob("node[0-9]*/meminfo"):
        for line in _read(file).splitlines():
            words = line.split()  # Node 0 MemTotal: 65536 kB
            if len(words) == 5 and words[2] == "MemTotal:":
                memory[file.parent.name] = 1024 * int(words[3])
    return memory


def cpu_limit(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> float | None:
    """Returns the limit of this process's control groups (version 1 or 2), in CPUs; None without a limit.

    Args:
        root: the mount point of the groups.
        own: text in the format of ``/proc/self/cgroup``; None: that file.
    """
    limits = [limit for group in _groups("cpu", root, own) for limit in _limits(group)]
    return min(limits, default=None)


def free_memory(
    root: Path = Path("/sys/fs/cgroup"), own: str | None = None, meminfo: Path = Path("/proc/meminfo")
) -> int:
    """Returns the bytes that this process can still allocate, within its control groups' limits.

    Args:
        root: the mount point of the control groups.
        own: text in the format of ``/proc/self/cgroup``; None: that file.
        meminfo: the file with the system's memory statistics.
    """
    system = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    if "MemAvailable" in system:
        free = 1024 * int(system["MemAvailable"].split()[0])
    else:  # not Linux: assume half of the memory
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min([free, *(left for group in _groups("memory", root, own) for left in _bytes_left(group))])


def _groups(controller: str, root: Path, own: str | None) -> Iterator[Path]:
    """Yields the control groups (version 1 or 2) that may limit this process: its own and their parents."""
    for line in (_read(Path("/proc/self/cgroup")) if own is None else own).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            hierarchies = [root]
        elif controller in controllers.split(","):
            hierarchies = [root / controller, root / controllers]
        else:
            continue
        # Inside a container, the path may start above the mount point.
        parts = [part for part in path.split("/") if part]
        for hierarchy in dict.fromkeys(hierarchies):
            for depth in range(len(parts) + 1):
                yield hierarchy.joinpath(*parts[:depth])


def _bytes_left(group: Path) -> list[int]:
    """Returns the bytes until a group reaches its limit; droppable file pages count as free."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        total, in_use = _read(group / limit).strip(), _read(group / used).strip()
        if total.isdigit() and in_use.isdigit():
            statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            return [max(0, int(total) - int(in_use) + int(statistics.get(dropped, 0)))]
    return []


def _limits(group: Path) -> list[float]:
    words = _read(group / "cpu.max").split()
    if not words:
        words = (_read(group / "cpu.cfs_quota_us") + " " + _read(group / "cpu.cfs_period_us")).split()
    if len(words) != 2 or words[0] in ("max", "-1"):
        return []
    return [int(words[0]) / int(words[1])]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
