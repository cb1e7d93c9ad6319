"""The tensor parallel ranks that this machine would get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_armllm.parallel.placement import (
    Core,
    cores_by_node,
    cpu_list,
    cpus_of,
    least_layer_bytes,
    rank_cores,
)
from torch_armllm.system.files import format_bytes
from torch_armllm.system.host import node_memory, numa_nodes


def rank_plan(
    cores: Sequence[Core] | None = None,
    nodes: Mapping[str, str] | None = None,
    memory: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the ranks that ``tensor_parallel_size="auto"`` starts for large models, as plain JSON types.

    Args:
        cores: the physical cores that the process may use; None: as its affinity says.
        nodes: CPUs of each NUMA node; None: as the system says.
        memory: bytes of each node; None: as the system says.

    Returns:
        ``nodes``: the CPUs, the CPUs that the process may use, and the bytes of memory (None if unknown) of
        each node. ``ranks``: the CPUs of each rank. ``layer_bytes``: bytes of weights for each decoder layer
        above which all these ranks start, and one rank below; None if there is one rank in any case.
    """
    nodes = numa_nodes() if nodes is None else nodes
    memory = node_memory() if memory is None else memory
    usable = cores_by_node(cores, nodes)
    ranks = rank_cores(len(usable), list(usable.values()))
    return {
        "nodes": {
            name: {"cpus": text, "usable": _cpus(usable.get(name, [])), "memory": memory.get(name)}
            for name, text in nodes.items()
        },
        "ranks": [_cpus(part) for part in ranks],
        "layer_bytes": round(least_layer_bytes(len(ranks))) if len(ranks) > 1 else None,
    }


def drawn(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns labeled lines that show the result of `rank_plan`."""
    lines = [(f"numa {name}", _node(node)) for name, node in plan["nodes"].items()]
    if plan["layer_bytes"] is None:
        return [*lines, ("ranks", "1: this process may use the cores of one NUMA node")]
    least = format_bytes(plan["layer_bytes"])
    text = f"{len(plan['ranks'])} for models with more than {least} of weights for each layer, else 1"
    lines.append(("ranks", text))
    for rank, cpus in enumerate(plan["ranks"]):
        on = [name for name, node in plan["nodes"].items() if cpus_of(cpus) & cpus_of(node["cpus"])]
        lines.append((f"  rank {rank}", f"CPUs {cpus}{' of ' if on else ''}{' and '.join(on)}"))
    return lines


def _node(node: Mapping[str, Any]) -> str:
    memory = f", {format_bytes(node['memory'])}" if node["memory"] else ""
    usable = f"CPUs {node['usable']}" if node["usable"] else "none"
    limited = "" if cpus_of(node["usable"]) == cpus_of(node["cpus"]) else f"; usable: {usable}"
    return f"CPUs {node['cpus']}{memory}{limited}"


def _cpus(cores: Sequence[Core]) -> str:
    return cpu_list(cpu for core in cores for cpu in core)
