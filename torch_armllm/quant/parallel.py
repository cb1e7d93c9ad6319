"""Maps a function over items in parallel, each item on one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Calls ``function`` on every item with `torch.get_num_threads` threads and returns the results in order.

    Every call runs its torch ops on one thread: long chains of small ops would otherwise spend their time in
    barriers, especially when other processes use the cores too.
    """
    before = torch.get_num_threads()
    threads = min(before, len(items))
    try:
        if threads <= 1:
            torch.set_num_threads(1)
            return [function(item) for item in items]
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(before)
