"""Pixels that requests hold at a time."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from torch_armllm.engine.images.pixel_budget import HeldPictures, PixelBudget, release_pictures


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_requests_wait_in_their_order_for_pixels_of_others() -> None:
    async def main() -> None:
        budget = PixelBudget(10)
        first = await budget.hold(6)
        large = asyncio.create_task(budget.hold(20))  # alone, once nobody holds any
        small = asyncio.create_task(budget.hold(1))
        canceled = asyncio.create_task(budget.hold(1))
        await _turns()
        assert not large.done() and not small.done()
        canceled.cancel()
        prompt: dict[str, Any] = {"multi_modal_data": {"image": first}}
        first += [object()]  # type: ignore[list-item]
        release_pictures(prompt)
        release_pictures(prompt)
        assert prompt == {} and first == []
        await _turns()
        assert large.done() and not small.done()
        (await large).release()
        (await large).release()
        await _turns()
        assert small.done()
        del small, large  # nothing refers to the pictures any more
        await asyncio.wait_for(asyncio.gather(budget.hold(5), budget.hold(5)), 10)
        assert not budget._held or budget._held == 10

    asyncio.run(main())


def test_pictures_are_a_list_in_other_processes() -> None:
    async def main() -> HeldPictures:
        return await PixelBudget(1).hold(1)

    held = asyncio.run(main())
    held += ["picture"]  # type: ignore[list-item]
    assert pickle.loads(pickle.dumps(held)) == ["picture"]
    assert type(pickle.loads(pickle.dumps(held))) is list
