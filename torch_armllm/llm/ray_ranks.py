"""Ranks that are actors of a Ray cluster; needs the extra ``ray``."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.rank_failures import RankFailures
from torch_armllm.llm.ray_places import Needs, bundles_in_order, reserve
from torch_armllm.parallel.rank_place import RankPlace

_SECONDS_TO_HEAR = 10.0
"""Time in which Ray tells that an actor has died, once a connection to it breaks."""

logger = logging.getLogger(__name__)


Load = Callable[[ModelRequest, EngineConfig], Any]
"""Loads a rank's part of a model."""


class RankActor:
    """A rank other than 0."""

    def place(self) -> str:
        """Returns the process and the machine, for errors."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def run(
        self, meeting: Mapping[str, str], load: Load, request: ModelRequest, config: EngineConfig
    ) -> None:
        """Loads a rank's part of a model, and computes steps until rank 0 ends.

        Args:
            meeting: environment variables by which ``torch.distributed`` connects the ranks.
            load: loader, which does not return on ranks other than 0.
            request: what it loads.
            config: of the engine.

        Raises:
            RuntimeError: a step has failed.
        """
        os.environ.update(meeting)
        try:
            load(request, config)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(str(ended.__cause__)) from ended.__cause__


class RayRanks:
    """Reserves the CPUs of all ranks, starts an actor for each rank but 0, and watches them.

    Rank 0 is this process, whose machine is one of the cluster.

    Args:
        needs: of the ranks.
        leader: place of this process.

    Raises:
        ValueError: the cluster has too few CPUs, or a rank does not start.
    """

    def __init__(self, needs: Needs, leader: RankPlace) -> None:
        self._leader = leader
        self._failures = RankFailures()
        self.on_failure = self._failures.on_failure
        self._closed = threading.Event()
        self._group, self._is_own = reserve(needs)
        self._actors: dict[int, Any] = {}
        self._places: dict[int, str] = {}
        try:
            for rank, bundle in enumerate(bundles_in_order(self._group)[1 : needs.ranks], start=1):
                self._actors[rank] = self._start(bundle, needs.threads)
            for rank, actor in self._actors.items():
                self._places[rank] = ray.get(actor.place.remote())
        except RayError as error:
            self.close()
            name = self._name(len(self._places) + 1)
            raise ValueError(f"{name} does not start: {_reason(error)}") from error
        for rank, place in self._places.items():
            logger.info("%s: %s", self._name(rank), place)

    def _name(self, rank: int) -> str:
        return str(replace(self._leader, rank=rank))

    def _start(self, bundle: int, threads: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor: Any = ray.remote(max_restarts=0, num_cpus=threads, scheduling_strategy=place)(RankActor)
        return actor.remote()

    @contextlib.contextmanager
    def meeting(self, load: Load, request: ModelRequest, config: EngineConfig) -> Iterator[None]:
        """Lets all other ranks load their parts; meanwhile this process is rank 0 of a group of ``torchrun``.

        Args:
            load: called by each rank.
            request: what it loads.
            config: of the engine.
        """
        common = {
            "MASTER_ADDR": ray.util.get_node_ip_address(),
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(self._leader.size),
            "TORCHELASTIC_RUN_ID": "ray",
        }
        results = {
            actor.run.remote({**common, "RANK": str(rank)}, load, request, config): rank
            for rank, actor in self._actors.items()
        }
        threading.Thread(target=self._watch, args=[results], name="armllm-ray-ranks", daemon=True).start()
        with _environment({**common, "RANK": "0"}):
            yield

    def _watch(self, results: dict[Any, int]) -> None:
        """Waits for the first actor that ends, and ends the others with it."""
        try:
            (first, *_), _ = ray.wait(list(results), num_returns=1)
        except (Exception, SystemExit) as error:  # `ray.shutdown` ends threads that wait by the latter
            if not self._closed.is_set():
                self._fail(f"Ray no longer watches the ranks: {type(error).__name__}: {error}")
            return
        if self._closed.is_set() or not ray.is_initialized():  # Ray would start a new cluster
            return
        rank, reason = results[first], "it has ended"
        try:
            ray.get(first)
        except Exception as error:  # any that an actor raises
            reason = _reason(error)
        if not self._closed.is_set():
            self._fail(f"{self._name(rank)} has failed: Ray actor, {self._places[rank]}: {reason}")

    def _fail(self, reason: str) -> None:
        self._failures.add(reason)
        self._end()  # so that no exchange waits for them, and another engine has the CPUs

    def failure(self) -> str | None:
        """Returns the reason why a rank has failed; None if all are well."""
        return self._failures.first

    def awaited_failure(self) -> str | None:
        """Returns the reason why a rank has failed, once Ray tells it; None if all are well."""
        return self._failures.wait(_SECONDS_TO_HEAR)

    def fail(self) -> None:
        """Ends the other ranks, as a step has failed here: because of one of them, or of this one."""
        if self.awaited_failure() is None:
            self.close()

    def close(self) -> None:
        """Ends the other ranks and gives their CPUs back."""
        self._closed.set()
        self._end()

    def _end(self) -> None:
        if not ray.is_initialized():  # Ray would start a new cluster
            return
        with contextlib.suppress(Exception):  # the cluster may have gone
            for actor in self._actors.values():
                ray.kill(actor)
            if self._is_own:
                remove_placement_group(self._group)


def _reason(error: Exception) -> str:
    """Returns what an error of Ray says, in a line."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if isinstance(error, RayActorError) else 0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
