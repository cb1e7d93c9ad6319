"""Bytes of caches that the leader asks other ranks for, without processes."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from queue import SimpleQueue
from socket import socketpair
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_armllm.engine.disk.rank_rows import RankRows, RankRowServer
from torch_armllm.engine.execution.message_codec import decode
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.row_order import RowAct, RowOrder
from torch_armllm.kv_cache.disk.rows import Rows
from torch_armllm.parallel.row_link import RowLink

BLOCK = RowAct.TAKE_BLOCK, RowAct.PUT_BLOCK
STATES = RowAct.TAKE_STATES, RowAct.PUT_STATES


class Outbox:
    """Gives each message to all servers, as followers read it."""

    def __init__(self) -> None:
        self.orders: list[SimpleQueue[Any]] = []

    def post(self, numbers: array[int], tensors: Iterable[Tensor] = ()) -> None:
        """Decodes a message, as each rank does."""
        order = decode(numbers.buffer_info()[0])
        for queue in self.orders:
            queue.put(order)


def caches(rank: int) -> Any:
    """Returns the cache of a rank, whose sizes are its own, and its states; the last rank has none."""
    generator = torch.Generator().manual_seed(rank)
    cache = [torch.randn(2, 5, 3 + rank, 4, generator=generator), None]
    states = [torch.randn(1, 3, 2 + rank, generator=generator).bfloat16()] if rank < 2 else []
    return SimpleNamespace(cache=cache, states=states)


def leader_of(ranks: list[Any]) -> RankLeader:
    """Returns a leader whose other ranks do its orders in threads."""
    outbox, links = Outbox(), []
    for rank in ranks:
        ours, theirs = socketpair()
        links.append(RowLink(ours, seconds=10))
        executor: Any = SimpleNamespace(caches=rank)
        server = RankRowServer(executor, RowLink(theirs, seconds=10))
        queue: SimpleQueue[Any] = SimpleQueue()
        outbox.orders.append(queue)

        def follow(queue: SimpleQueue[Any] = queue, server: RankRowServer = server) -> None:
            while (order := queue.get()) is not None:
                server.do(order)

        threading.Thread(target=follow, daemon=True).start()
    return RankLeader(outbox, links=links)


def test_rows_of_all_ranks_follow_each_other_and_come_back() -> None:
    own, *others = ranks = [caches(rank) for rank in range(3)]
    leader = leader_of(others)
    for kind, acts, number in (("cache", BLOCK, 4), ("states", STATES, 2)):
        parts = [Rows(getattr(rank, kind)) for rank in ranks]
        rows = RankRows(getattr(own, kind), [each.nbytes for each in parts[1:]], leader, acts)
        taken = rows.take(number)
        assert np.array_equal(taken, np.concatenate([each.take(number) for each in parts]))
        assert rows.nbytes == len(taken)
        rows.put(0, taken)
        assert np.array_equal(rows.take(0), taken), "an order comes after those before it"
        assert [each.take(0).tolist() for each in parts] == [each.take(number).tolist() for each in parts]


def test_what_was_not_asked_for_is_refused() -> None:
    ours, theirs = socketpair()
    leader, rank = RowLink(ours, seconds=10), RowLink(theirs, seconds=10)
    rank.send(RowOrder(RowAct.TAKE_BLOCK, 3), b"")
    with pytest.raises(ConnectionError, match=r"\[1, 3\] in place of \[1, 4\]"):
        leader.receive(RowOrder(RowAct.TAKE_BLOCK, 4), bytearray(2))
    rank.send((1, 3), b"")
    with pytest.raises(ConnectionError, match="another number of bytes"):
        leader.receive((1, 3), bytearray(2))
    rank.close()
    with pytest.raises(ConnectionError, match="has ended"):
        leader.receive((1, 3), bytearray(2))


def test_a_rank_that_has_gone_is_an_error_of_the_disk_and_of_the_engine() -> None:
    ours, theirs = socketpair()
    leader = RankLeader(Outbox(), links=[RowLink(ours, seconds=10)])
    rows = RankRows(caches(0).cache, [8], leader, BLOCK)
    theirs.close()
    with pytest.raises(ConnectionError, match="the other rank has ended"):
        rows.take(0)
