"""Ranks on one machine or several that meet over a network: those of ``torchrun``, or actors of Ray."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.rank_leader import RankLeader, RankWatch
from torch_armllm.llm.ranks.agreement import check_shardable, for_follower
from torch_armllm.llm.ranks.rank_shard import FollowerSettings
from torch_armllm.llm.ranks.session import Others, load_and_follow
from torch_armllm.parallel.connections import RankConnections
from torch_armllm.parallel.network import NetworkExchange, NetworkMailbox
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.row_link import RowLink
from torch_armllm.parallel.stage_link import StageLink

CONNECT_SECONDS = 120.0
"""Time in which all ranks have to meet."""
EXCHANGE_SECONDS = 300.0
"""Time in which all ranks have to answer."""
Gather = Callable[[Any], list[Any]]
"""Returns what each rank gives; all call it at the same time."""

logger = logging.getLogger(__name__)


class StartedRanks(RankWatch, Others, Protocol):
    """Other ranks, as the process sees them that has started them."""


class NetworkRanks:
    """A rank's session with others, to each of which it has connections of its own.

    Args:
        place: of this process.
        gather: exchanges what ranks give until they follow.
        address: of rank 0, in the network of all.
        started: the other ranks, on rank 0 if it has started them; None: nobody watches them, and a broken
            connection ends a step.

    Attributes:
        place: see above.
        gather: see above.

    Raises:
        ValueError: a rank cannot be reached in time.
    """

    def __init__(
        self, place: RankPlace, gather: Gather, address: str | None, started: StartedRanks | None = None
    ) -> None:
        self.place, self.gather = place, gather
        self._started = started
        self._connections = RankConnections(place.rank, place.size, gather, address, 3, CONNECT_SECONDS)
        self._rows, self._messages, cached = self._connections.sockets
        self._cached = {rank: RowLink(each) for rank, each in enumerate(cached) if each is not None}
        self._opened: list[NetworkExchange | StageLink] = []
        self._leader: RankLeader | None = None

    def open_group(self, whole_experts: bool) -> RankGroup | None:
        """Returns the ranks of this process's stage, which gather columns; None if it is the only one."""
        place = self.place
        if place.tensor_ranks == 1:
            return None
        sockets = [self._rows[rank] for rank in place.members]
        exchange = NetworkExchange(place.tensor_rank, sockets, EXCHANGE_SECONDS)
        self._opened.append(exchange)
        return RankGroup(
            place.tensor_rank, place.tensor_ranks, exchange.communicator, whole_experts=whole_experts
        )

    def open_link(self, group: RankGroup | None) -> StageLink | None:
        """Returns the connections to the stages before and after; None if there is one stage."""
        if self.place.stages == 1:
            return None
        previous, following = (self._rows[rank] for rank in (self.place.previous, self.place.following))
        assert previous is not None and following is not None
        link = StageLink(previous, following, group=group)
        self._opened.append(link)
        return link

    def share(self, own: Any) -> Any:
        """Returns what rank 0 gives."""
        return self.gather(own)[0]

    def lead(self, settings: FollowerSettings) -> RankLeader:
        """Tells the other ranks the sizes of their caches, and returns what sends them steps."""
        self.gather(settings)
        mailbox = NetworkMailbox(self._messages)
        self._leader = RankLeader(mailbox, self._started, list(self._cached.values()))
        return self._leader

    def follow(self) -> tuple[FollowerSettings, NetworkMailbox, RowLink]:
        """Waits for rank 0's settings; returns them, its messages and the connection for bytes of caches."""
        settings: FollowerSettings = self.gather(None)[0]
        return settings, NetworkMailbox(self._messages), self._cached[0]

    def awaited_failure(self) -> str | None:
        """Returns the reason why a rank has failed, once that is known; None if all are well."""
        return None if self._started is None else self._started.awaited_failure()

    def close(self) -> None:
        """Ends the other ranks, if they still run, and closes the connections to them."""
        if self._started is not None:
            self._started.close()
        if self._leader is not None:
            with contextlib.suppress(RuntimeError):  # they have ended
                self._leader.stop()
        for each in self._opened:
            each.close()
        self._connections.close()


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of ranks that ``torchrun`` has started; None if this process is not one of them."""
    if "TORCHELASTIC_RUN_ID" not in environment and not dist.is_initialized():
        return None
    return dist.get_world_size() if dist.is_initialized() else int(environment["WORLD_SIZE"])


def is_launched_follower(config: EngineConfig) -> bool:
    """True if ``torchrun`` has started this process as a rank other than 0 of those of an engine."""
    if config.ranks == 1 or launched_ranks() is None:
        return False
    return (dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])) > 0


def follow_launched(request: ModelRequest, config: EngineConfig) -> int:
    """Loads a shard of a model and computes steps until rank 0 ends; returns the status of this process.

    Raises:
        ValueError: the model or a setting does not allow it, or another rank differs.
    """
    check_shardable(request.model, config)
    session = join_launched(config)
    try:
        load_and_follow(session, *for_follower(request, config))
    except (RuntimeError, OSError) as error:
        logger.error("rank %d ends: %s", session.place.rank, error)
        return 1
    return 0


def join_launched(config: EngineConfig) -> NetworkRanks:
    """Joins the ranks that ``torchrun`` has started.

    Raises:
        ValueError: there is another number of ranks, or they do not meet in time.
    """
    address = os.environ.get("MASTER_ADDR")
    if not dist.is_initialized():
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=CONNECT_SECONDS))
        except (RuntimeError, ValueError) as error:
            raise not_met(f"{address}:{os.environ.get('MASTER_PORT')}", error) from error
    place = RankPlace(dist.get_rank(), config.tensor_ranks, config.pipeline_parallel_size)
    if (started := dist.get_world_size()) != place.size:
        asked = f"tensor_parallel_size = {place.tensor_ranks}, pipeline_parallel_size = {place.stages}"
        raise ValueError(f"{asked}: {place.size} processes, but torchrun has started {started}")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=EXCHANGE_SECONDS))

    def gather(own: Any) -> list[Any]:
        every: list[Any] = [None] * place.size
        dist.all_gather_object(every, own, group=group)
        return every

    return NetworkRanks(place, gather, address)


def not_met(where: str, error: Exception) -> ValueError:
    """Returns the error of ranks that do not meet."""
    return ValueError(f"the ranks do not meet at {where} within {CONNECT_SECONDS:g} s: {error}")
