"""CPUs of a Ray cluster that are reserved for ranks; needs the extra ``ray``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

_SECONDS_TO_RESERVE = 30.0
"""Time in which other programs may give back CPUs that are in use."""


@dataclass(frozen=True)
class Needs:
    """CPUs of ranks.

    Attributes:
        ranks: number of ranks, that of this process included.
        threads: CPUs of each.
        spread: prefers a machine for each rank; False: as few machines as possible.
    """

    ranks: int
    threads: int
    spread: bool


def machines() -> list[dict[str, Any]]:
    """Returns the machines of the cluster, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def connect() -> None:
    """Connects this process to a cluster if it is not yet: ``RAY_ADDRESS``, this machine's, or a new one."""
    if not ray.is_initialized():
        ray.init()


def reserve(needs: Needs) -> tuple[PlacementGroup, bool]:
    """Reserves the CPUs of all ranks: those of rank 0 on this machine.

    An actor of a placement group, such as a replica of Ray Serve, has reserved them already.

    Returns:
        The placement group, with a bundle for each rank, and whether it is to be removed at the end.

    Raises:
        ValueError: there are too few CPUs.
    """
    current = get_current_placement_group()
    if current is not None:
        _check_bundles(current, needs)
        return current, False
    _check_machines(needs)
    here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
    bundles = [{"CPU": needs.threads} | (here if rank == 0 else {}) for rank in range(needs.ranks)]
    group = placement_group(bundles, strategy="SPREAD" if needs.spread else "PACK")
    if not group.wait(_SECONDS_TO_RESERVE):
        remove_placement_group(group)
        free = ray.available_resources().get("CPU", 0)
        raise ValueError(
            f"{_needed(needs)}, and of the Ray cluster's {_count()} CPUs {free:g} are free after "
            f"{_SECONDS_TO_RESERVE:g} s, or they are too few on single machines: end other programs, or give "
            "fewer threads or ranks"
        )
    return group, True


def bundles_in_order(group: PlacementGroup) -> list[int]:
    """Returns the bundles of a group, those of a machine one after another, and that of rank 0 first."""
    at: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    first = {node: bundle for bundle, node in sorted(at.items(), reverse=True)}
    return sorted(at, key=lambda bundle: (first[at[bundle]], bundle))


def _needed(needs: Needs) -> str:
    ranks, threads = needs.ranks, needs.threads
    return f"{ranks} ranks of {threads} threads each need {ranks * threads} CPUs"


def _count() -> str:
    return f"{ray.cluster_resources().get('CPU', 0):g}"


def _check_machines(needs: Needs) -> None:
    """Raises ValueError if the cluster cannot hold the ranks even when nothing else uses it."""
    cpus = {node["NodeManagerAddress"]: node["Resources"]["CPU"] for node in machines()}
    own = cpus.get(ray.util.get_node_ip_address())
    if own is None:
        raise ValueError(
            "rank 0 is this process, and its machine has no CPUs in the Ray cluster: start one here"
        )
    remedy = "add machines, or give fewer threads or ranks"
    if needs.threads * needs.ranks > sum(cpus.values()):
        raise ValueError(f"{_needed(needs)}, and the Ray cluster has {_count()}: {remedy}")
    if needs.threads > own:
        raise ValueError(
            f"a rank of {needs.threads} threads needs as many CPUs, and this machine has {own:g}: {remedy}"
        )
    fitting = sum(int(count // needs.threads) for count in cpus.values())
    if fitting < needs.ranks:
        raise ValueError(
            f"{_needed(needs)}, and the machines of the Ray cluster have room for {fitting}, with "
            f"{', '.join(f'{count:g}' for count in cpus.values())} CPUs: {remedy}"
        )


def _check_bundles(group: PlacementGroup, needs: Needs) -> None:
    """Raises ValueError if the placement group of this actor does not hold the ranks."""
    cpus = [bundle.get("CPU", 0) for bundle in group.bundle_specs]
    if len(cpus) < needs.ranks or min(cpus) < needs.threads:
        raise ValueError(
            f"{_needed(needs)}, and the placement group of this actor has bundles of "
            f"{', '.join(f'{count:g}' for count in cpus)} CPUs: give it a bundle for each rank"
        )
