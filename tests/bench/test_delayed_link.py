"""The link that holds frames, between two interfaces of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bench.delayed_link import DelayedLink

NAMES = (f"link-{os.getpid() % 100000}-0", f"link-{os.getpid() % 100000}-1")
SECONDS = 0.02
FRAME = bytes(6) + bytes(range(1, 7)) + b"\x88\xb5"  # to no one, of a type for experiments


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """Returns sockets of the two interfaces, which are up."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        link = DelayedLink(NAMES, SECONDS)
    except OSError as error:
        pytest.skip(f"no virtual interfaces here: {error}")
    with link, ExitStack() as stack:
        sockets = []
        for name in NAMES:
            subprocess.run(["ip", "link", "set", name, "up"], check=True)
            end = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88B5)))
            end.bind((name, 0x88B5))
            end.settimeout(10)
            sockets.append(end)
        yield sockets


def test_frames_come_in_order_after_the_delay(ends: list[socket.socket]) -> None:
    for sender, receiver in (ends, ends[::-1]):
        frames = [FRAME + bytes([number]) * 50 for number in range(20)]
        began = time.perf_counter()
        for frame in frames:
            sender.send(frame)
        assert [receiver.recv(2000) for _ in frames] == frames
        assert time.perf_counter() - began >= SECONDS
