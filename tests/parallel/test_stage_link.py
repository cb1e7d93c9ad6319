"""Connections between the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from socket import socket

import pytest
import torch
from torch import Tensor

from torch_armllm.ops.collective import close_communicator, communicator_memory, open_communicator
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.stage_link import StageLink, rings


@contextmanager
def links(stages: int, seconds: float = 20.0) -> Iterator[list[StageLink]]:
    made = [StageLink(*sockets, seconds) for sockets in rings(1, stages)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_pass_around_a_ring(dtype: torch.dtype) -> None:
    with links(3) as (first, second, third):
        for count in (1, 0, 5, 5):
            rows = torch.randn(count, 7, dtype=torch.float32).to(dtype)
            first.send(rows[:, 1:])
            second.send(second.receive(count))
            third.send(third.receive(count))
            found = first.receive(count)
            assert found.dtype == dtype and torch.equal(found, rows[:, 1:])


def test_two_stages_send_large_rows_before_they_read() -> None:
    rows = torch.randn(4096, 1024)  # more than a socket holds
    with links(2) as (first, second):
        first.send(rows)
        second.send(rows + 1)
        expected = rows.clone()
        rows.zero_()  # what is sent is a copy
        assert torch.equal(second.receive(4096), expected)
        assert torch.equal(first.receive(4096), expected + 1)


def test_another_number_of_rows_is_an_error() -> None:
    with links(2) as (first, second):
        first.send(torch.zeros(2, 3))
        with pytest.raises(RuntimeError, match="sends 2 rows of a step with 4"):
            second.receive(4)


def test_a_stage_that_ends_or_does_not_answer_is_an_error() -> None:
    with links(2, seconds=0.2) as (first, second):
        with pytest.raises(RuntimeError, match="has not answered for 0.2 s"):
            first.receive(1)
        second.close()
        with pytest.raises(RuntimeError, match="has ended"):
            first.receive(1)


def test_ranks_of_a_stage_send_their_columns_and_gather_those_of_all() -> None:
    ranks, stages, buffer_bytes = 3, 2, 64
    memory = [communicator_memory(ranks, buffer_bytes) for _ in range(stages)]
    rows = [torch.randn(count, 7) for count in (4, 0, 1)]

    def link_of(rank: int, sockets: tuple[socket, socket]) -> tuple[StageLink, RankGroup]:
        stage, member = divmod(rank, ranks)
        group = RankGroup(member, ranks, open_communicator(memory[stage], member, ranks, buffer_bytes))
        return StageLink(*sockets, 20.0, group), group

    def run(rank: int) -> list[Tensor]:
        link, found = made[rank][0], []
        for each in rows:
            if rank < ranks:
                link.send(each)
            found.append(link.receive(len(each)))
            if rank >= ranks:
                link.send(found[-1] + 1)
        return found

    made = [link_of(rank, sockets) for rank, sockets in enumerate(rings(ranks, stages))]
    with ThreadPoolExecutor(len(made)) as pool:
        results = list(pool.map(run, range(len(made))))
    for rank, found in enumerate(results):
        for each, expected in zip(found, rows, strict=True):
            assert torch.equal(each, expected + (rank < ranks))
    for link, group in made:
        assert {received.shape[1] for received in link._memory.values()} == {len(group.share(7))}
        link.close()
        close_communicator(group.communicator)
