"""Ranks that are actors of a Ray cluster; needs the extra ``ray``."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.llm.ranks.agreement import for_follower
from torch_armllm.llm.ranks.network import CONNECT_SECONDS, EXCHANGE_SECONDS, Gather, NetworkRanks, not_met
from torch_armllm.llm.ranks.ray_places import Needs, bundles_in_order, connect, machines, reserve
from torch_armllm.llm.ranks.session import closed_after_errors, load_and_follow
from torch_armllm.llm.ranks.watcher import RankWatcher
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.system.host import physical_cores

_SECONDS_TO_HEAR = 10.0
"""Time in which Ray tells that an actor has died, once a connection to it breaks."""
_SECONDS_BETWEEN_LOOKS = 0.01

logger = logging.getLogger(__name__)


class RankActor:
    """A rank other than 0."""

    def place(self) -> str:
        """Returns the process and the machine, for errors."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def run(
        self, place: RankPlace, address: str, port: int, request: ModelRequest, config: EngineConfig
    ) -> None:
        """Loads a rank's shard of a model, and computes steps until rank 0 ends.

        Args:
            place: of the rank.
            address: of rank 0's machine.
            port: of rank 0's store.
            request: what it loads.
            config: of the engine.
        """
        store = _store(address, port)
        session = NetworkRanks(place, _gather_by(store, place, lambda: None), address)
        load_and_follow(session, request, config)


def settings_on_ray(request: ModelRequest, config: EngineConfig) -> tuple[ModelRequest, EngineConfig]:
    """Connects this process to a cluster; returns what each of its machines loads, with a number of threads.

    Args:
        request: what to load: a folder, or a name on the model hub, which all machines can read.
        config: of the engine.
    """
    folder = Path(request.source).expanduser()
    request = replace(request, model=str(folder.absolute())) if folder.is_dir() else request
    connect()
    spread = _spreads(config)
    ranks_here = -(-config.ranks // len(machines())) if spread else config.ranks
    threads = config.threads or max(1, len(physical_cores()) // ranks_here)
    # actors of a machine do not know of each other: none may pin threads to cores
    return request, replace(config, threads=threads, pin_threads=False)


def _spreads(config: EngineConfig) -> bool:
    return config.has_stages_only and len(machines()) > 1


def start_actors(request: ModelRequest, config: EngineConfig) -> NetworkRanks:
    """Starts the other ranks as actors, and meets them.

    Args:
        request: what they load; see `settings_on_ray`.
        config: of the engine, with a number of threads.

    Raises:
        ValueError: the cluster has too few CPUs, or a rank has failed.
    """
    place = RankPlace(0, config.tensor_ranks, config.pipeline_parallel_size)
    assert config.threads is not None
    actors = RayActors(Needs(place.size, config.threads, _spreads(config)), place)
    with closed_after_errors(actors):
        address = ray.util.get_node_ip_address()
        store = _store(address, 0, is_master=True)
        actors.run(address, store.port, *for_follower(request, config))
        return NetworkRanks(place, _gather_by(store, place, actors.check), address, actors)


def _store(address: str, port: int, is_master: bool = False) -> Any:
    seconds = timedelta(seconds=CONNECT_SECONDS)
    try:
        return TCPStore(address, port, None, is_master, timeout=seconds, wait_for_workers=False)
    except RuntimeError as error:
        raise not_met(f"{address}:{port}", error) from error


def _gather_by(store: Any, place: RankPlace, check: Callable[[], None]) -> Gather:
    """Returns a function that exchanges what all ranks give in a store.

    Args:
        store: that all ranks share.
        place: of this process.
        check: called while it waits; raises an error to end that.
    """
    rounds = iter(range(1 << 62))

    def gather(own: Any) -> list[Any]:
        number, end = next(rounds), time.monotonic() + EXCHANGE_SECONDS
        keys = [f"{number}/{rank}" for rank in range(place.size)]
        store.set(keys[place.rank], pickle.dumps(own))
        while not store.check(keys):
            check()
            if time.monotonic() > end:
                raise RuntimeError(f"other ranks have not answered for {EXCHANGE_SECONDS:g} s")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return [pickle.loads(store.get(key)) for key in keys]

    return gather


class RayActors:
    """Reserves the CPUs of all ranks, starts an actor for each rank but 0, and watches them.

    Rank 0 is this process, whose machine is one of the cluster.

    Args:
        needs: of the ranks.
        leader: place of this process.

    Attributes:
        on_failure: calls a method, which is kept weakly, with the error once a rank has failed.

    Raises:
        ValueError: the cluster has too few CPUs, or a rank does not start.
    """

    def __init__(self, needs: Needs, leader: RankPlace) -> None:
        # no exchange is to wait for the others then, and another engine is to have the CPUs
        self._watcher = RankWatcher(leader, lambda _: self._end())
        self.on_failure = self._watcher.on_failure
        self._leader = leader
        self._group, self._is_own = reserve(needs)
        self._actors: dict[int, Any] = {}
        self._places: dict[int, str] = {}
        self._results: dict[int, Any] = {}
        try:
            for rank, bundle in enumerate(bundles_in_order(self._group)[1 : needs.ranks], start=1):
                self._actors[rank] = self._start(bundle, needs.threads)
            for rank, actor in self._actors.items():
                self._places[rank] = ray.get(actor.place.remote())
        except RayError as error:
            self.close()
            name = self._watcher.name(len(self._places) + 1)
            raise ValueError(f"{name} does not start: {_reason(error)}") from error
        for rank, place in self._places.items():
            logger.info("%s: %s", self._watcher.name(rank), place)

    def _start(self, bundle: int, threads: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor: Any = ray.remote(max_restarts=0, num_cpus=threads, scheduling_strategy=place)(RankActor)
        return actor.remote()

    def run(self, address: str, port: int, request: ModelRequest, config: EngineConfig) -> None:
        """Lets all actors meet at a store, load their shards and follow, and begins to watch them."""
        for rank, actor in self._actors.items():
            given = replace(self._leader, rank=rank), address, port
            self._results[rank] = actor.run.remote(*given, request, config)
        self._watcher.begin(self._actors, self._end_of)

    def _end_of(self, rank: int) -> str | None:
        """Waits for the end of an actor."""
        reason = "it has ended"
        try:
            ray.get(self._results[rank])
        except RayError as error:
            if not ray.is_initialized():
                return None
            reason = _reason(error)
        except (Exception, SystemExit) as error:  # `ray.shutdown` ends threads that wait by the latter
            return f"Ray no longer watches the ranks: {type(error).__name__}: {error}"
        return f"{self._watcher.name(rank)} has failed: Ray actor, {self._places[rank]}: {reason}"

    def check(self) -> None:
        """Raises a RuntimeError if a rank has failed."""
        if (reason := self.failure()) is not None:
            raise RuntimeError(reason)

    def failure(self) -> str | None:
        """Returns the reason why a rank has failed; None if all are well."""
        return self._watcher.first

    def awaited_failure(self) -> str | None:
        """Returns the reason why a rank has failed, once Ray tells it; None if all are well."""
        return self._watcher.wait(_SECONDS_TO_HEAR)

    def fail(self) -> None:
        """Ends the other ranks, as a step has failed here: because of one of them, or of this one."""
        if self.awaited_failure() is None:
            self.close()

    def close(self) -> None:
        """Ends the other ranks and gives their CPUs back."""
        self._watcher.closed.set()
        self._end()

    def _end(self) -> None:
        if not ray.is_initialized():  # Ray would start a new cluster
            return
        with contextlib.suppress(Exception):  # the cluster may have gone
            for actor in self._actors.values():
                ray.kill(actor)
            if self._is_own:
                remove_placement_group(self._group)


def _reason(error: RayError) -> str:
    """Returns what an error of Ray says, in a line."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if isinstance(error, RayActorError) else 0]
