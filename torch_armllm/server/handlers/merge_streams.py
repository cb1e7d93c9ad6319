"""Merging of several output streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from torch_armllm.engine.outputs import RequestOutput

Outputs = AsyncGenerator[RequestOutput, None]


async def merge_streams(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yields outputs as they arrive, each with the index of its stream.

    Closing the generator closes all streams.  An error in one stream closes all, and is raised.
    """
    pending = {asyncio.ensure_future(_next(outputs)): index for index, outputs in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending[task]
                if (output := task.result()) is not None:
                    yield index, output
                    pending[asyncio.ensure_future(_next(streams[index]))] = index
                del pending[task]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for outputs in streams:
            await outputs.aclose()


async def _next(outputs: Outputs) -> RequestOutput | None:
    return await anext(outputs, None)
