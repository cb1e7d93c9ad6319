"""Tensor parallel ranks that ``torchrun`` has started, on one machine or several."""

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
from torch_armllm.engine.execution.rank_follower import follow
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.kv_cache.dtypes import STATE_DTYPES
from torch_armllm.kv_cache.shapes import with_state_dtype
from torch_armllm.parallel.connections import Connections
from torch_armllm.parallel.network import NetworkExchange, NetworkMailbox
from torch_armllm.plan.plan_model import PlanModel

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
        ranks: number of ranks that are asked for.

    Attributes:
        rank: number of this process.
        size: number of ranks.

    Raises:
        ValueError: there is another number of ranks, or they do not meet in time.
    """

    def __init__(self, ranks: int) -> None:
        if not dist.is_initialized():
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            try:
                dist.init_process_group("gloo", timeout=timedelta(seconds=CONNECT_SECONDS))
            except (RuntimeError, ValueError) as error:
                raise ValueError(
                    f"the ranks do not meet at {where} within {CONNECT_SECONDS:g} s: {error}"
                ) from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size != ranks:
            raise ValueError(
                f"tensor_parallel_size = {ranks}, but torchrun has started {self.size} processes"
            )
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_EXCHANGE_SECONDS))
        self._connections = Connections(self.rank, self.size, self._group, 2, CONNECT_SECONDS)
        columns, self._messages = self._connections.sockets
        self.exchange = NetworkExchange(self.rank, columns, _EXCHANGE_SECONDS)
        self._leader: RankLeader | None = None

    def agree(self, own: str) -> None:
        """Compares what has to be equal on all ranks.

        Raises:
            ValueError: a rank has another.
        """
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, own, group=self._group)
        for rank, other in enumerate(every):
            if other != every[0]:
                raise ValueError(f"tensor parallel rank {rank} has {other}, and rank 0 has {every[0]}")

    def leader(self, sizes: dict[str, Any]) -> RankLeader:
        """Gives the other ranks the sizes of their caches, and returns what sends them steps."""
        dist.broadcast_object_list([sizes], 0, group=self._group)
        mailbox = NetworkMailbox(self._messages)
        self._leader = RankLeader(mailbox, lambda: None, lambda: None, lambda call: None)
        return self._leader

    def close(self) -> None:
        """Ends the other ranks, if they still run, and closes the connections to them."""
        if self._leader is not None:
            with contextlib.suppress(RuntimeError):  # they have ended
                self._leader.stop()
        self.exchange.close()
        self._connections.close()

    def run(self, model: PlanModel, config: EngineConfig) -> None:
        """Computes steps until rank 0 ends, and then ends this process."""
        sizes: list[Any] = [None]
        dist.broadcast_object_list(sizes, 0, group=self._group)
        shape = with_state_dtype(model.shape, STATE_DTYPES[sizes[0].pop("state_dtype")])
        executor = StepExecutor(model, shape=shape, **sizes[0])
        team = ThreadTeam(choose_threads(config.threads, config.pin_threads))
        try:
            with team.at_work():
                follow(self.rank, NetworkMailbox(self._messages), executor)
        except RuntimeError as error:
            logger.error("rank %d ends: %s", self.rank, error)
            sys.exit(1)
        sys.exit(0)
