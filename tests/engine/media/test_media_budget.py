"""Bytes of media that requests hold at a time."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from torch_armllm.engine.media.media_budget import HeldMedia, MediaBudget, release_media


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_requests_wait_in_their_order_for_bytes_of_others() -> None:
    async def main() -> None:
        budget = MediaBudget(10)
        first = await budget.hold(6)
        large = asyncio.create_task(budget.hold(20))  # alone, once nobody holds any
        small = asyncio.create_task(budget.hold(1))
        canceled = asyncio.create_task(budget.hold(1))
        await _turns()
        assert not large.done() and not small.done()
        canceled.cancel()
        prompt: dict[str, Any] = {"multi_modal_data": first}
        images = first["image"] = [object()]
        release_media(prompt)
        release_media(prompt)
        assert prompt == {} and first == {} and images == []
        await _turns()
        assert large.done() and not small.done()
        (await large).release()
        (await large).release()
        await _turns()
        assert small.done()
        del small, large  # nothing refers to the media any more
        await asyncio.wait_for(asyncio.gather(budget.hold(5), budget.hold(5)), 10)
        assert not budget._held or budget._held == 10

    asyncio.run(main())


def test_media_are_a_dictionary_in_other_processes() -> None:
    async def main() -> HeldMedia:
        return await MediaBudget(1).hold(1)

    held = asyncio.run(main())
    held["image"] = ["image"]
    assert pickle.loads(pickle.dumps(held)) == {"image": ["image"]}
    assert type(pickle.loads(pickle.dumps(held))) is dict
