"""Long-running work outside of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_worker_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs a function in a new thread while the event loop goes on.

    The thread ends with the work, and the compute threads that it started end with it.
    """
    pool = ThreadPoolExecutor(1, "armllm-work")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
    finally:
        pool.shutdown(wait=False)
