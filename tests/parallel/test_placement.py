"""The cores of ranks, and their number."""

from __future__ import annotations

import pytest

from torch_armllm.parallel.placement import (
    best_ranks,
    cores_by_node,
    cpu_list,
    cpus_of,
    least_layer_bytes,
    rank_cores,
    usable_nodes,
)

CORES = [(0, 8), (1, 9), (2,), (3,), (4, 12), (5, 13)]
NODES = {"node0": "0-2,8-10", "node1": "3-5,11-13"}


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", set()), ("3", {3}), ("0-3,8", {0, 1, 2, 3, 8}), (" 1, 4-5\n", {1, 4, 5}), ("7-7", {7})],
)
def test_cpus_of_a_list(text: str, cpus: set[int]) -> None:
    assert cpus_of(text) == cpus


@pytest.mark.parametrize(
    ("cpus", "text"), [([], ""), ([3], "3"), ([8, 1, 0, 2], "0-2, 8"), ([1, 0, 4, 5], "0-1, 4-5")]
)
def test_lists_of_cpus(cpus: list[int], text: str) -> None:
    assert cpu_list(cpus) == text
    assert cpus_of(text) == set(cpus)


def test_cores_by_node() -> None:
    assert cores_by_node(CORES, NODES) == {
        "node0": [(0, 8), (1, 9), (2,)],
        "node1": [(3,), (4, 12), (5, 13)],
    }


def test_nodes_without_usable_cores_are_left_out() -> None:
    assert cores_by_node(CORES[3:], NODES) == {"node1": [(3,), (4, 12), (5, 13)]}


def test_cores_of_unknown_nodes_are_together() -> None:
    assert cores_by_node(CORES, {}) == {"": CORES}
    assert cores_by_node([*CORES, (20,)], NODES)[""] == [(20,)]


def test_this_machine_has_a_node_with_cores() -> None:
    nodes = usable_nodes()
    assert nodes and all(nodes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_ranks_share_out_all_cores_in_order(ranks: int) -> None:
    by_node = list(cores_by_node(CORES, NODES).values())
    parts = rank_cores(ranks, by_node)
    assert [core for part in parts for core in part] == CORES
    assert {len(part) for part in parts} <= {len(CORES) // ranks, -(-len(CORES) // ranks)}
    if ranks == 2:
        assert parts == by_node


def test_more_ranks_than_cores_take_turns() -> None:
    assert rank_cores(5, [[(0,)], [(1, 9)]]) == [[(0,)], [(1, 9)], [(0,)], [(1, 9)], [(0,)]]


def test_large_models_get_a_rank_for_each_node() -> None:
    assert best_ranks(40 << 30, 64, 2) == 2
    assert best_ranks(40 << 30, 64, 4) == 4


def test_small_models_and_single_nodes_get_one_rank() -> None:
    assert best_ranks(40 << 30, 64, 1) == 1
    assert best_ranks(40 << 30, 64, 0) == 1
    assert best_ranks(50 << 20, 28, 2) == 1  # exchanges would take longer than the weights


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_the_least_weights_of_a_layer_decide(nodes: int) -> None:
    least = least_layer_bytes(nodes)
    assert best_ranks(int(32 * least) + 1, 32, nodes) == nodes
    assert best_ranks(int(32 * least), 32, nodes) == 1
