"""Messages from the leader, which is a thread of the same process here."""

from __future__ import annotations

import ctypes
import threading
from array import array
from typing import NoReturn

import pytest
import torch

from torch_armllm.parallel import mailbox as module
from torch_armllm.parallel.mailbox import SLOT_BYTES, SLOTS, Mailbox, mailbox_bytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(module, "SLOT_BYTES", 1 << 10)
    monkeypatch.setattr(module, "_ONCE_MS", 10)
    return torch.zeros(mailbox_bytes(3), dtype=torch.uint8)


class Stopped(Exception):
    """A wait was ended."""


def stop() -> NoReturn:
    raise Stopped


def numbers_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def test_messages_arrive_in_order_at_every_reader(memory: torch.Tensor) -> None:
    leader = Mailbox(memory, 3, lambda: None)
    seen: dict[int, list[list[int]]] = {1: [], 2: []}

    def read(rank: int) -> None:
        box = Mailbox(memory, 3, lambda: None)
        for _ in range(50):
            seen[rank].append(numbers_at(box.receive(), 2))
            box.done(rank)

    readers = [threading.Thread(target=read, args=[rank]) for rank in (1, 2)]
    for reader in readers:
        reader.start()
    for i in range(50):
        leader.post(array("q", [i, -i]))
    for reader in readers:
        reader.join(20)
    assert seen[1] == seen[2] == [[i, -i] for i in range(50)]


def test_tensors_follow_the_numbers(memory: torch.Tensor) -> None:
    leader, reader = (Mailbox(memory, 2, stop) for _ in range(2))
    leader.post(array("q", [7]), [torch.tensor([1, 2]), torch.tensor([3, 4], dtype=torch.int32)])
    address = reader.receive()
    assert numbers_at(address, 3) == [7, 1, 2]
    assert list((ctypes.c_int32 * 2).from_address(address + 24)) == [3, 4]


def test_the_leader_is_a_few_messages_ahead_at_most(memory: torch.Tensor) -> None:
    leader, reader = (Mailbox(memory, 2, stop) for _ in range(2))
    for number in range(SLOTS):
        leader.post(array("q", [number]))
    with pytest.raises(Stopped):
        leader.post(array("q", [SLOTS]))
    first = reader.receive()
    assert numbers_at(first, 1) == [0]
    with pytest.raises(Stopped):  # the reader has not said that it is done
        leader.post(array("q", [SLOTS]))
    reader.done(1)
    leader.post(array("q", [SLOTS]))
    assert numbers_at(first, 1) == [SLOTS]  # the same slot
    assert numbers_at(reader.receive(), 1) == [1]


def test_the_slowest_reader_counts(memory: torch.Tensor) -> None:
    leader, quick, _ = (Mailbox(memory, 3, stop) for _ in range(3))
    for i in range(SLOTS):
        leader.post(array("q", [i]))
        quick.receive()
        quick.done(1)
    with pytest.raises(Stopped):
        leader.post(array("q", [SLOTS]))


def test_a_reader_without_messages_asks_whether_all_is_well(memory: torch.Tensor) -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        if len(asked) == 3:
            stop()

    with pytest.raises(Stopped):
        Mailbox(memory, 2, ask).receive()
    assert len(asked) == 3


def test_a_message_that_does_not_fit_is_refused(memory: torch.Tensor) -> None:
    leader, reader = (Mailbox(memory, 2, stop) for _ in range(2))
    with pytest.raises(ValueError, match="has 1032 bytes; at most 1024 fit"):
        leader.post(array("q", [0]), [torch.zeros(1 << 10, dtype=torch.uint8)])
    leader.post(array("q", [5]), [torch.zeros(1016, dtype=torch.uint8)])
    assert numbers_at(reader.receive(), 1) == [5]


def test_slots_hold_the_longest_steps() -> None:
    assert mailbox_bytes(64) == 65 * 64 + SLOTS * SLOT_BYTES
    assert mailbox_bytes(64, 32) == 65 * 64 + 64 * SLOT_BYTES
