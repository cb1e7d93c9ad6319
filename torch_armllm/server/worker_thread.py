"""Work that takes long, beside a loop of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """Works while others are answered, in a thread whose end ends those that computed for it."""
    pool = ThreadPoolExecutor(1, "armllm-work")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
    finally:
        pool.shutdown(wait=False)
