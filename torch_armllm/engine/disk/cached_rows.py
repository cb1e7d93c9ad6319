"""Bytes of the blocks and states of an engine, and what tells them from those of other engines."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from torch_armllm.engine.disk.fingerprint import fingerprint
from torch_armllm.engine.disk.rank_rows import RankRows
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.execution.row_order import RowAct, RowOrder
from torch_armllm.kv_cache.disk.rows import Rows


class CachedRows(NamedTuple):
    """Bytes of all blocks and all states' slots."""

    blocks: Rows
    states: Rows
    fingerprint: str
    """See `torch_armllm.engine.disk.fingerprint`; of all shards of the model."""


def cached_rows(runner: PlanRunner) -> CachedRows:
    """Returns the bytes of an engine's caches, those of other processes included.

    Raises:
        RankFailedError: another process has failed.
    """
    leader, executor = runner.leader, runner.executor
    caches = executor.caches
    blocks, states = Rows(caches.cache), Rows(caches.states)
    if leader is None:
        return CachedRows(blocks, states, fingerprint(executor, blocks, states))
    try:
        with leader.rows:
            order = RowOrder(RowAct.DESCRIBE)
            leader.send(order)
            own = fingerprint(executor, blocks, states)
            others = [json.loads(link.receive_all(order)) for link in leader.links]
    except OSError as error:
        raise leader.fail(error) from error
    every, block_sizes, state_sizes = zip(*others, strict=True)
    return CachedRows(
        RankRows(caches.cache, block_sizes, leader, (RowAct.TAKE_BLOCK, RowAct.PUT_BLOCK)),
        RankRows(caches.states, state_sizes, leader, (RowAct.TAKE_STATES, RowAct.PUT_STATES)),
        hashlib.blake2b(" ".join([own, *every]).encode(), digest_size=16).hexdigest(),
    )
