"""Several streams of outputs as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from torch_armllm.engine.outputs import RequestOutput

Outputs = AsyncGenerator[RequestOutput, None]


async def merged(several: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs as they come, each with the number of its stream; closing it ends all.

    What goes wrong in one ends all, and is raised.
    """
    waiting = {asyncio.ensure_future(_next(outputs)): place for place, outputs in enumerate(several)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place = waiting[task]
                if (output := task.result()) is not None:
                    yield place, output
                    waiting[asyncio.ensure_future(_next(several[place]))] = place
                del waiting[task]
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for outputs in several:
            await outputs.aclose()


async def _next(outputs: Outputs) -> RequestOutput | None:
    return await anext(outputs, None)
