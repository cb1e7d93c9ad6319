"""Processes that ``torchrun`` has started on one machine or several, to share a model out."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.disk.rank_rows import RankRowServer
from torch_armllm.engine.execution.rank_follower import follow
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.stage_course import Stage
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.llm.rank_part import FollowerSettings, RankPart
from torch_armllm.parallel.connections import Connections
from torch_armllm.parallel.network import NetworkExchange, NetworkMailbox
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.row_link import RowLink
from torch_armllm.parallel.stage_link import StageLink

CONNECT_SECONDS = 120.0
"""Time in which all ranks have to meet."""
_EXCHANGE_SECONDS = 300.0

logger = logging.getLogger(__name__)


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of ranks that ``torchrun`` has started; None if this process is not one of them."""
    if "TORCHELASTIC_RUN_ID" not in environment and not dist.is_initialized():
        return None
    return dist.get_world_size() if dist.is_initialized() else int(environment["WORLD_SIZE"])


class LaunchedRanks:
    """The group of ranks that this process is one of.

    Args:
        tensor_ranks: number of ranks of each stage that are asked for.
        stages: number of stages that are asked for.

    Attributes:
        place: of this process.

    Raises:
        ValueError: there is another number of ranks, or they do not meet in time.
    """

    def __init__(self, tensor_ranks: int, stages: int) -> None:
        if not dist.is_initialized():
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            try:
                dist.init_process_group("gloo", timeout=timedelta(seconds=CONNECT_SECONDS))
            except (RuntimeError, ValueError) as error:
                raise ValueError(
                    f"the ranks do not meet at {where} within {CONNECT_SECONDS:g} s: {error}"
                ) from error
        self.place = RankPlace(dist.get_rank(), tensor_ranks, stages)
        if (started := dist.get_world_size()) != self.place.size:
            asked = f"tensor_parallel_size = {tensor_ranks}, pipeline_parallel_size = {stages}"
            raise ValueError(f"{asked}: {self.place.size} processes, but torchrun has started {started}")
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_EXCHANGE_SECONDS))
        self._connections = Connections(self.place.rank, self.place.size, self._group, 3, CONNECT_SECONDS)
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
        exchange = NetworkExchange(place.tensor_rank, sockets, _EXCHANGE_SECONDS)
        self._opened.append(exchange)
        return RankGroup(
            place.tensor_rank, place.tensor_ranks, exchange.communicator, whole_experts=whole_experts
        )

    def open_link(self, group: RankGroup | None) -> StageLink:
        """Returns the connections of a stage, whose ranks are given, to those before and after it."""
        previous, following = (self._rows[rank] for rank in (self.place.previous, self.place.following))
        assert previous is not None and following is not None
        link = StageLink(previous, following, group=group)
        self._opened.append(link)
        return link

    def gather(self, own: Any) -> list[Any]:
        """Returns what each rank gives; all call this at the same time."""
        every: list[Any] = [None] * self.place.size
        dist.all_gather_object(every, own, group=self._group)
        return every

    def leader(self, settings: FollowerSettings) -> RankLeader:
        """Tells the other ranks the sizes of their caches, and returns what sends them steps."""
        dist.broadcast_object_list([settings], 0, group=self._group)
        mailbox = NetworkMailbox(self._messages)
        self._leader = RankLeader(mailbox, links=list(self._cached.values()))
        return self._leader

    def close(self) -> None:
        """Ends the other ranks, if they still run, and closes the connections to them."""
        if self._leader is not None:
            with contextlib.suppress(RuntimeError):  # they have ended
                self._leader.stop()
        for each in self._opened:
            each.close()
        self._connections.close()

    def run(self, part: RankPart, config: EngineConfig, stage: Stage | None) -> None:
        """Computes steps until rank 0 ends, and then ends this process.

        Args:
            part: this rank's part of the model.
            config: of the engine.
            stage: of a pipeline; None: there is none.
        """
        settings: list[Any] = [None]
        dist.broadcast_object_list(settings, 0, group=self._group)
        executor = part.executor(settings[0], stage)
        team = ThreadTeam(choose_threads(config.threads, config.pin_threads))
        try:
            with team.at_work():
                rows = RankRowServer(executor, self._cached[0])
                follow(self.place.rank, NetworkMailbox(self._messages), executor, rows)
        except (RuntimeError, OSError) as error:
            logger.error("rank %d ends: %s", self.place.rank, error)
            raise SystemExit(1) from error
        sys.exit(0)
