"""Bytes of the caches of several processes, which together are those of one engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
from torch import Tensor

from torch_armllm.engine.disk.fingerprint import fingerprint
from torch_armllm.engine.errors import RankFailedError
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.row_order import RowAct, RowOrder
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.kv_cache.disk.rows import Bytes, Rows
from torch_armllm.parallel.row_link import RowLink


class RankRows(Rows):
    """A block or slot of all ranks: the bytes of the leader, then those of each other rank.

    A rank copies its bytes between two steps, in the order of the leader's messages.

    Args:
        tensors: the leader's own; see `Rows`.
        sizes: bytes of a block or slot of each other rank.
        leader: sends them orders.
        acts: by which a rank gives and takes the bytes.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor | None],
        sizes: Sequence[int],
        leader: RankLeader,
        acts: tuple[RowAct, RowAct],
    ) -> None:
        super().__init__(tensors)
        self._own, self._sizes, self._leader = self.nbytes, sizes, leader
        self._take, self._put = acts
        self.nbytes += sum(sizes)

    def take(self, index: int) -> Bytes:
        """Returns a copy of the bytes of all ranks.

        Raises:
            OSError: a rank has failed.
        """
        order, leader = RowOrder(self._take, index), self._leader
        try:
            with leader.rows:
                leader.send(order)
                taken = super().take(index)
                for link, part in self._parts_of(taken):
                    link.receive(order, part)
        except (OSError, RankFailedError) as error:
            failed = leader.fail(error)
            raise ConnectionError(str(failed)) from failed
        return taken

    def put(self, index: int, row: Bytes) -> None:
        """Overwrites a block or slot of all ranks.

        Raises:
            RankFailedError: a rank has failed.
        """
        order, leader = RowOrder(self._put, index), self._leader
        try:
            with leader.rows:
                leader.send(order)
                super().put(index, row)
                for link, part in self._parts_of(row):
                    link.send(order, part)
        except (OSError, RankFailedError) as error:
            raise leader.fail(error) from error

    def map_pages(self, count: int) -> None:
        """Has the system map the memory of the first blocks on all ranks."""
        with suppress(RankFailedError):  # the engine ends by itself
            self._leader.send(RowOrder(RowAct.MAP_BLOCKS, count))
        super().map_pages(count)

    def _parts_of(self, row: Bytes) -> Iterator[tuple[RowLink, Bytes]]:
        begin = self._own
        for link, size in zip(self._leader.links, self._sizes, strict=True):
            yield link, row[begin : begin + size]
            begin += size


class RankRowServer:
    """Does what the leader asks a rank to do with the bytes of its caches.

    Args:
        executor: has the caches.
        link: to the leader.
    """

    def __init__(self, executor: StepExecutor, link: RowLink) -> None:
        self._executor, self._link = executor, link
        self._blocks, self._states = Rows(executor.caches.cache), Rows(executor.caches.states)
        self._received: dict[Rows, Bytes] = {}

    def do(self, order: RowOrder) -> None:
        """Does it, before the steps that come after the order.

        Raises:
            OSError: the leader has gone.
        """
        rows = self._states if order.act in (RowAct.TAKE_STATES, RowAct.PUT_STATES) else self._blocks
        if order.act is RowAct.DESCRIBE:
            self._link.send_later(order, self._describe)
        elif order.act is RowAct.MAP_BLOCKS:
            threading.Thread(target=rows.map_pages, args=[order.number], daemon=True).start()
        elif order.act in (RowAct.TAKE_BLOCK, RowAct.TAKE_STATES):
            taken = rows.take(order.number)
            self._link.send_later(order, lambda: taken)
        else:
            if rows not in self._received:  # new memory costs more than what it receives
                self._received[rows] = np.empty(rows.nbytes, np.uint8)
            row = self._received[rows]
            self._link.receive(order, row)
            rows.put(order.number, row)

    def _describe(self) -> bytes:
        own = fingerprint(self._executor, self._blocks, self._states)
        return json.dumps([own, self._blocks.nbytes, self._states.nbytes]).encode()
