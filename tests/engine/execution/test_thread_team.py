"""Number and placement of the compute threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_armllm.engine.execution import thread_team
from torch_armllm.engine.execution.thread_team import (
    ThreadSettings,
    ThreadTeam,
    apply_threads,
    choose_threads,
)
from torch_armllm.ops.threads import team_threads
from torch_armllm.system.host import physical_cores

pytestmark = pytest.mark.usefixtures("warm_processes")
ALONE = [(0,), (1,), (2,), (3,)]
SHARED = [(0, 4), (1, 5), (2, 6), (3, 7)]


def chosen(**given: Any) -> ThreadSettings:
    settings = {"cores": ALONE, "current": 4, "environment": {}, **given}
    return choose_threads(**settings)


def test_default_is_one_pinned_thread_per_core() -> None:
    found = chosen()
    assert (found.count, found.cores) == (4, tuple(ALONE))
    assert str(found) == "4 threads (physical cores), pinned to CPUs 0-3"
    found = chosen(cores=SHARED, current=8)
    assert (found.count, found.cores) == (4, tuple(SHARED))
    assert str(found) == "4 threads (physical cores of 8 CPUs), pinned to CPUs 0-7"
    assert str(chosen(cores=[(1,), (2,), (9,)], current=3)).endswith("pinned to CPUs 1-2, 9")


def test_cgroup_limit_sets_the_count_and_disables_pinning() -> None:
    found = chosen(limit=2.5)
    assert (found.count, found.cores) == (2, ())
    assert chosen(limit=0.5).count == 1
    assert chosen(limit=4.0).cores
    assert chosen(limit=2.5, count=4).cores == ()


@pytest.mark.parametrize(
    ("given", "count", "why"),
    [
        ({"count": 3, "current": 4}, 3, "as requested"),
        ({"current": 2, "environment": {"OMP_NUM_THREADS": "2"}}, 2, "OMP_NUM_THREADS"),
        ({"current": 6, "environment": {"MKL_NUM_THREADS": "6"}}, 6, "MKL_NUM_THREADS"),
        ({"current": 3}, 3, "torch.set_num_threads"),
        ({"current": 9}, 4, "physical cores"),
    ],
)
def test_user_settings_take_precedence(given: dict[str, Any], count: int, why: str) -> None:
    found = chosen(**given)
    assert (found.count, found.why) == (count, why)
    assert bool(found.cores) == (count == 4)


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES"])
def test_openmp_affinity_variables_disable_pinning(name: str) -> None:
    found = chosen(environment={name: "close"})
    assert (found.count, found.cores) == (4, ())
    assert name in str(found)
    assert chosen(environment={name: "close"}, pin=True).cores


def test_pinning_can_be_disabled_and_forced() -> None:
    assert chosen(pin=False).cores == ()
    assert chosen(pin=True, count=2).cores == ((0,), (1,))
    assert chosen(count=1).cores == ()
    with pytest.raises(ValueError, match="5 threads cannot be pinned to 4 cores"):
        chosen(pin=True, count=5)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        chosen(count=0)


def test_physical_cores_respect_the_affinity_mask(tmp_path: Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert physical_cores(tmp_path, set(range(8))) == SHARED
    assert physical_cores(tmp_path, {1, 2, 6}) == [(1,), (2, 6)]
    assert physical_cores(tmp_path / "nothing", {1, 2}) == [(1,), (2,)]
    assert sum(map(len, physical_cores())) == len(os.sched_getaffinity(0))


def test_each_calling_thread_has_its_own_team() -> None:
    found: list[int] = []
    team = team_threads()
    assert team[0] == threading.get_native_id() and len(set(team)) == torch.get_num_threads()
    other = threading.Thread(target=lambda: found.extend(team_threads()))
    other.start()
    other.join()
    assert found and not set(found) & set(team)


PROGRAM = """
import os, torch
from torch_armllm.ops.threads import team_threads
from torch_armllm.engine.execution.thread_team import ThreadSettings, apply_threads
cpus = sorted(os.sched_getaffinity(0))
apply_threads(ThreadSettings(2, "", ((cpus[0],), (cpus[1],)), ""))
main, worker = team_threads()
assert torch.get_num_threads() == 2
assert os.sched_getaffinity(worker) == {cpus[1]}, os.sched_getaffinity(worker)
assert os.sched_getaffinity(main) == set(cpus)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_only_workers_are_pinned() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


PROGRAM_WITH_A_THREAD = """
import os, threading
from torch_armllm.ops.threads import team_threads
from torch_armllm.engine.execution.thread_team import ThreadTeam, ThreadSettings
cpus = sorted(os.sched_getaffinity(0))
team = ThreadTeam(ThreadSettings(2, "", ((cpus[0],), (cpus[1],)), ""))
team.settle()
def other():
    team.settle()
    assert os.sched_getaffinity(team_threads()[1]) == {cpus[1]}
    print("settled")
thread = threading.Thread(target=other)
thread.start()
thread.join()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_workers_of_every_calling_thread_are_pinned() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM_WITH_A_THREAD], check=True, capture_output=True)
    assert b"settled" in found.stdout


def test_contended_workers_are_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stood, placed = [100.0], {11: 0, 12: 0}, {}
    monkeypatch.setattr(thread_team, "apply_threads", lambda chosen: [11, 12])
    monkeypatch.setattr(thread_team, "waited", stood.__getitem__)
    monkeypatch.setattr(thread_team.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(thread_team.os, "sched_setaffinity", placed.__setitem__)
    team = ThreadTeam(chosen())
    team.settle()
    for step in range(8):
        clock[0] += 0.3
        stood[11] += 10_000_000  # a thirtieth of the time since the last check
        team.settle()
        assert not placed, step
    stood[12] += 400_000_000
    team.settle()
    assert not placed  # the last check was just before
    clock[0] += 0.5
    team.settle()
    assert set(placed) == {11, 12} and placed[12] == os.sched_getaffinity(0)
    placed.clear()
    clock[0] += 9
    stood[12] += 10**10
    team.settle()
    assert not placed


def test_waited_returns_run_queue_time() -> None:
    assert thread_team.waited(threading.get_native_id()) >= 0
    assert thread_team.waited(10**9) == 0


def test_current_thread_count_changes_nothing() -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    apply_threads(ThreadSettings(before[0], "", (), ""))
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
