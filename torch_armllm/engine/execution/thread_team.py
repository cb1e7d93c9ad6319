"""Chooses the number of compute threads and the cores they run on."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_armllm.ops import threads
from torch_armllm.parallel.placement import cpu_list
from torch_armllm.system.exclusive import PROCESS_LOCK, SharedExclusiveLock
from torch_armllm.system.forks import is_forked
from torch_armllm.system.host import cpu_limit, physical_cores

_PLACED_BY = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables that place OpenMP's threads on cores."""
_COUNTED_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_CHECK_INTERVAL = 0.5
"""Seconds between two checks of how long workers waited for a core."""
_DISPLACED = 1 / 8
"""Fraction of that time above which a worker counts as displaced; next to a busy process it waits half of it.

The same policy as ``kDisplaced`` of ops/runtime/worker_governor.h, which acts within milliseconds.
"""

_logger = logging.getLogger(__name__)

Core = tuple[int, ...]
"""CPUs of one core that this process may use; several if the core runs several hardware threads."""


@dataclass(frozen=True)
class ThreadSettings:
    """Number and placement of the compute threads.

    Attributes:
        count: number of threads, the calling thread included.
        why: source of the number, for messages.
        cores: the core of each thread; empty if the system places them.
        placement: reason for the placement; for pinned threads, their CPUs.
    """

    count: int
    why: str
    cores: tuple[Core, ...]
    placement: str

    def __str__(self) -> str:
        where = f"pinned to {self.placement}" if self.cores else f"not pinned: {self.placement}"
        return f"{self.count} thread{'s' if self.count > 1 else ''} ({self.why}), {where}"


def choose_threads(
    count: int | None = None,
    pin: bool | None = None,
    *,
    cores: list[Core] | None = None,
    limit: float | None = None,
    current: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ThreadSettings:
    """Chooses the number of compute threads and their cores.

    The user's settings come first: ``count``, OpenMP's environment variables, `torch.set_num_threads`, and
    the CPUs that ``taskset`` allows. The default is one thread per physical core, as two threads on one core
    compete for its caches, but no more than the control group grants CPU time for. By default, threads are
    pinned only if they fill all cores that the process may use: other processes would choose the same cores
    of a part.

    Args:
        count: number of threads; None: see above.
        pin: True to pin threads, False not to; None: see above.
        cores: cores that the process may use; None: read from the system.
        limit: CPU time that the control group grants, in CPUs; read from the system if ``cores`` is None.
        current: torch's number of threads; None: read from torch.
        environment: environment variables, for OpenMP's settings.

    Raises:
        ValueError: ``count`` is less than 1, or more threads are to be pinned than there are cores.
    """
    if cores is None:
        cores, limit = physical_cores(), cpu_limit()
    if is_forked():
        return ThreadSettings(1, "this process was forked", (), "there is one")
    current = torch.get_num_threads() if current is None else current
    count, why = _count(count, cores, limit, current, environment)
    placed_by = [name for name in _PLACED_BY if environment.get(name)]
    if pin is False:
        return ThreadSettings(count, why, (), "as requested")
    if pin and count > len(cores):
        raise ValueError(f"{count} threads cannot be pinned to {len(cores)} cores: request fewer threads")
    if not hasattr(os, "sched_setaffinity"):
        return ThreadSettings(count, why, (), "this system does not support it")
    if not pin:
        if placed_by:
            return ThreadSettings(count, why, (), f"{placed_by[0]} places them")
        if count == 1:
            return ThreadSettings(count, why, (), "there is only one thread")
        if count != len(cores):
            return ThreadSettings(count, why, (), f"the process may use {len(cores)} cores")
        if limit is not None and limit < count:
            return ThreadSettings(count, why, (), f"the control group grants the time of {limit:g} cores")
    cpus = [cpu for core in cores[:count] for cpu in core]
    return ThreadSettings(count, why, tuple(cores[:count]), f"CPUs {cpu_list(cpus)}")


def apply_threads(chosen: ThreadSettings) -> list[int]:
    """Makes torch use the chosen threads for all later ops of the calling thread.

    The calling thread itself is not pinned, as threads and processes that it starts would inherit its
    affinity. The system places it on the core that the workers leave free.

    Returns:
        System ids of the pinned threads; none in a forked process, which keeps to one thread.
    """
    if is_forked():
        return []
    if torch.get_num_threads() != chosen.count:
        torch.set_num_threads(chosen.count)
    if not chosen.cores:
        return []
    _, *workers = threads.team_threads()
    for worker, core in zip(workers, chosen.cores[1:], strict=True):
        os.sched_setaffinity(worker, core)
    return workers


class ThreadTeam:
    """The chosen threads of the computing thread: every thread that starts an op has workers of its own.

    Workers stay pinned to their cores while no other load wants those cores.  Once another process takes a
    core, or a second engine chose the same cores, the system must be free to move them.

    Args:
        chosen: number of threads, and their cores.
        lock: shared while the threads compute; held exclusively while a model is traced.
    """

    def __init__(self, chosen: ThreadSettings, lock: SharedExclusiveLock = PROCESS_LOCK) -> None:
        self.chosen = chosen
        self._lock = lock
        self._caller: int | None = None
        self._wait_times: dict[int, int] = {}
        self._last_check = 0.0

    def at_work(self) -> ThreadTeam:
        """Returns a context manager: inside, the chosen threads compute, and no model is traced."""
        return self

    def __enter__(self) -> None:
        self._lock.acquire(exclusive=False)
        try:
            self.settle()
        except BaseException:
            self._lock.release(exclusive=False)
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release(exclusive=False)

    def settle(self) -> None:
        """Applies the chosen threads to the calling thread; nearly free if the same thread called it last."""
        caller, now = threading.get_ident(), time.monotonic()
        if caller != self._caller:
            self._caller = caller
            self._wait_times = {worker: waited(worker) for worker in apply_threads(self.chosen)}
            self._last_check = now
        elif self._wait_times and now - self._last_check >= _CHECK_INTERVAL:
            self._check_workers(now)

    def _check_workers(self, now: float) -> None:
        """Unpins the workers if one of them has waited too long for its core."""
        before, most = self._wait_times, _DISPLACED * (now - self._last_check) * 1e9
        self._wait_times = {worker: waited(worker) for worker in before}
        self._last_check = now
        if any(after - before[worker] > most for worker, after in self._wait_times.items()):
            for worker in before:
                with contextlib.suppress(ProcessLookupError):  # OpenMP ends workers that it does not need
                    os.sched_setaffinity(worker, os.sched_getaffinity(0))
            self._wait_times.clear()
            _logger.info("threads are not pinned any more: other processes want their cores")


def waited(thread: int) -> int:
    """Returns the nanoseconds that a thread was ready to run without a core; 0 if that is unknown."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _count(
    count: int | None, cores: list[Core], limit: float | None, current: int, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Returns the number of threads, and its source."""
    if count is not None:
        if count < 1:
            raise ValueError(f"the number of threads must be at least 1, not {count}")
        return count, "as requested"
    named = [name for name in _COUNTED_BY if environment.get(name)]
    if named:
        return current, named[0]
    cpus = sum(len(core) for core in cores)
    if current < cpus and current != len(cores):
        return current, "torch.set_num_threads"
    if limit is not None and limit < len(cores):
        return max(1, int(limit)), f"the control group grants the time of {limit:g} cores"
    shared = f" of {cpus} CPUs" if cpus > len(cores) else ""
    return len(cores), f"physical cores{shared}"
