"""The cores of each rank, and the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from torch_armllm.system.host import numa_nodes, physical_cores

Core = tuple[int, ...]
"""CPUs of one core."""

_NODE_BANDWIDTH = 150e9
"""Bytes per second that the cores of a node read from its own memory, roughly: a Graviton3 or a half of a
Graviton4.  Only its relation to `_EXCHANGE` matters."""
_WHOLE_GAIN = 1.3
"""Speed of one process on two nodes relative to one node, as measured on two Graviton4 by vLLM's users."""
_EXCHANGE = 6e-6
"""Seconds of an exchange between nodes."""
_EXCHANGES_PER_LAYER = 4


def cores_by_node(
    cores: Sequence[Core] | None = None, nodes: Mapping[str, str] | None = None
) -> dict[str, list[Core]]:
    """Returns the cores that this process may use, by NUMA node; nodes without any are left out.

    Args:
        cores: the physical cores that the process may use; None: as its affinity says.
        nodes: CPUs of each node, as `numa_nodes` returns them; None: as the system says.  Cores of no node
            are listed under an empty name.
    """
    cores = physical_cores() if cores is None else cores
    nodes = numa_nodes() if nodes is None else nodes
    by_node: dict[str, list[Core]] = {}
    node_of = {cpu: name for name, text in nodes.items() for cpu in cpus_of(text)}
    for core in cores:
        by_node.setdefault(node_of.get(core[0], ""), []).append(core)
    return by_node


def usable_nodes() -> list[list[Core]]:
    """Returns the cores that this process may use, a list for each NUMA node with any."""
    return list(cores_by_node().values())


def rank_cores(ranks: int, by_node: Sequence[Sequence[Core]] | None = None) -> list[list[Core]]:
    """Returns the cores of each rank: adjacent ones of as few nodes as possible.

    With fewer cores than ranks, several ranks have the same one.

    Args:
        ranks: number of ranks.
        by_node: cores of each node; None: those that the process may use.
    """
    by_node = usable_nodes() if by_node is None else by_node
    cores = [core for node in by_node for core in node]
    count = len(cores)
    if count < ranks:
        return [[cores[rank % count]] for rank in range(ranks)]
    return [cores[rank * count // ranks : (rank + 1) * count // ranks] for rank in range(ranks)]


def rank_cpus(ranks: int) -> list[list[int]]:
    """Returns the CPUs of each rank."""
    return [[cpu for core in part for cpu in core] for part in rank_cores(ranks)]


_cpus_before: dict[frozenset[int], set[int]] = {}
"""CPUs of a thread before it became a rank 0, by those of this rank: threads that it starts inherit them."""


def place_on(cpus: list[int]) -> None:
    """Lets this thread, and those that it starts, run on the CPUs of rank 0 only."""
    _cpus_before.setdefault(frozenset(cpus), os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus)


def take_cpus_back() -> None:
    """Lets this thread use all its CPUs again, so that the ranks of another engine share out all of them."""
    if _cpus_before and (before := _cpus_before.get(frozenset(os.sched_getaffinity(0)))) is not None:
        os.sched_setaffinity(0, before)


def cpus_of(text: str) -> set[int]:
    """Returns the CPUs of a list such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def cpu_list(cpus: Iterable[int]) -> str:
    """Formats CPUs, as in ``0-3, 8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def best_ranks(weight_bytes: int, layers: int, nodes: int) -> int:
    """Returns the number of ranks with which a model's decode step is fastest: 1, or one a node.

    A step reads all weights once, and ranks exchange columns in each layer.

    Args:
        weight_bytes: of the packed model.
        layers: number of its decoder layers.
        nodes: NUMA nodes that the process may use.
    """
    return nodes if nodes > 1 and weight_bytes > layers * least_layer_bytes(nodes) else 1


def least_layer_bytes(nodes: int) -> float:
    """Returns the bytes of weights for each decoder layer above which a rank on each node is faster.

    With fewer, exchanges take longer than the memory of further nodes saves.

    Args:
        nodes: number of NUMA nodes, at least 2.
    """
    saved = (1 / _WHOLE_GAIN - 1 / nodes) / _NODE_BANDWIDTH
    return _EXCHANGES_PER_LAYER * _EXCHANGE / saved
