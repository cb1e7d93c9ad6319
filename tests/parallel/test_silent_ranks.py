"""Ranks that keep the leader waiting."""

from __future__ import annotations

from array import array

import torch

from torch_armllm.parallel.mailbox import Mailbox
from torch_armllm.parallel.shared_memory import GroupMemory
from torch_armllm.parallel.silent_ranks import SilentRanks

RANKS, POLLS = 3, 2


class Group:
    """The memory of ranks, and the poll of its leader."""

    def __init__(self, tensor_ranks: int = RANKS, stages: int = 1) -> None:
        self._tensor_ranks, ranks = tensor_ranks, tensor_ranks * stages
        self.memory = GroupMemory(tensor_ranks, stages)
        self.silent = SilentRanks(self.memory, tensor_ranks, stages, POLLS)
        self.silent.poll()
        self._boxes = [Mailbox(self.memory.mail, ranks, lambda: None) for _ in range(ranks)]

    def exchange(self, *ranks: int) -> None:
        """Lets ranks publish their next exchange."""
        for rank in ranks:
            stage, member = divmod(rank, self._tensor_ranks)
            self.memory.exchanges[stage].view(torch.int64)[8 * (1 + member)] += 1

    def post(self, *readers: int) -> None:
        """Posts a message, which some ranks read."""
        self._boxes[0].post(array("q", [1]))
        for rank in readers:
            self._boxes[rank].receive()
            self._boxes[rank].done(rank)

    def polls(self, count: int = POLLS) -> list[int]:
        """Polls, and returns the last result."""
        return [self.silent.poll() for _ in range(count)][-1]


def test_idle_ranks_are_well() -> None:
    group = Group()
    assert group.polls(10) == []
    group.exchange(0, 1, 2)
    group.post(1, 2)
    assert group.polls(10) == []


def test_the_rank_that_holds_up_the_others_is_found() -> None:
    group = Group()
    group.exchange(0, 1)
    assert group.polls(POLLS - 1) == []
    assert group.polls(1) == [2]


def test_a_rank_that_does_not_read_its_messages_is_found() -> None:
    group = Group()
    group.post(2)
    assert group.polls() == [1]


def test_a_rank_that_moves_is_well_however_far_behind() -> None:
    group = Group()
    group.exchange(*[0] * 100, *[2] * 100)
    for _ in range(10):
        group.exchange(1)
        assert group.polls(POLLS) == []


def test_ranks_that_wait_for_the_leader_are_well() -> None:
    group = Group()
    group.exchange(1, 2)
    assert group.polls(10) == []


def test_the_rank_that_holds_up_its_stage_is_found_though_others_wait_for_that_stage() -> None:
    group = Group(tensor_ranks=2, stages=3)
    group.post(1, 2, 3, 4, 5)
    group.exchange(0, 1, 3)
    group.post(1)
    assert group.polls(POLLS + 1) == [2]


def test_a_stage_that_does_not_read_its_messages_is_found() -> None:
    group = Group(tensor_ranks=1, stages=3)
    group.post(2)
    assert group.polls() == [1]


def test_a_failure_is_seen_in_every_stage() -> None:
    memory = GroupMemory(2, 2)
    assert memory.failed_rank is None
    memory.fail(3)
    memory.fail(1)
    assert memory.failed_rank == 3
    assert [int(each.view(torch.int64)[0]) for each in memory.exchanges] == [4, 4]
