"""The plan of tensor parallel ranks that ``torch-armllm env`` draws."""

from __future__ import annotations

import json
import re

from torch_armllm.engine.reports import diagnostics
from torch_armllm.engine.reports.rank_plan import drawn, rank_plan
from torch_armllm.parallel.placement import least_layer_bytes

NODES = {"node0": "0-3", "node1": "4-7"}
MEMORY = {"node0": 64 * 10**9, "node1": 32 * 10**9}
ALL = [(cpu,) for cpu in range(8)]


def test_two_nodes_get_a_rank_each() -> None:
    plan = rank_plan(ALL, NODES, MEMORY)
    assert plan["ranks"] == ["0-3", "4-7"]
    assert plan["layer_bytes"] == round(least_layer_bytes(2))
    assert drawn(plan) == [
        ("numa node0", "CPUs 0-3, 64.00 GB"),
        ("numa node1", "CPUs 4-7, 32.00 GB"),
        ("ranks", "2 for models with more than 13.4 MB of weights for each layer, else 1"),
        ("  rank 0", "CPUs 0-3 of node0"),
        ("  rank 1", "CPUs 4-7 of node1"),
    ]
    assert json.loads(json.dumps(plan)) == plan


def test_cores_that_the_process_may_not_use() -> None:
    plan = rank_plan([(0,), (4,), (6,), (7,)], NODES, {})
    assert drawn(plan) == [
        ("numa node0", "CPUs 0-3; usable: CPUs 0"),
        ("numa node1", "CPUs 4-7; usable: CPUs 4, 6-7"),
        ("ranks", "2 for models with more than 13.4 MB of weights for each layer, else 1"),
        ("  rank 0", "CPUs 0, 4 of node0 and node1"),
        ("  rank 1", "CPUs 6-7 of node1"),
    ]


def test_a_process_on_one_node_has_one_rank() -> None:
    lines = drawn(rank_plan(ALL[4:], NODES, MEMORY))
    assert lines[0] == ("numa node0", "CPUs 0-3, 64.00 GB; usable: none")
    assert lines[2:] == [("ranks", "1: this process may use the cores of one NUMA node")]


def test_hardware_threads_stay_with_their_core() -> None:
    plan = rank_plan([(0, 4), (1, 5), (2, 6), (3, 7)], {"node0": "0-1,4-5", "node1": "2-3,6-7"}, {})
    assert plan["ranks"] == ["0-1, 4-5", "2-3, 6-7"]
    assert [text for _, text in drawn(plan)[:2]] == ["CPUs 0-1,4-5", "CPUs 2-3,6-7"]


def test_a_system_without_nodes() -> None:
    assert drawn(rank_plan(ALL, {}, {})) == [("ranks", "1: this process may use the cores of one NUMA node")]


def test_the_description_of_the_machine_shows_the_plan() -> None:
    info = diagnostics.describe()
    info["tensor_parallel"] = rank_plan(ALL, NODES, MEMORY)
    lines = re.sub("\n {16}", " ", diagnostics.render(info)).splitlines()
    assert "numa node1      CPUs 4-7, 32.00 GB" in lines
    assert "  rank 1        CPUs 4-7 of node1" in lines
