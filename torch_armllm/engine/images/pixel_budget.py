"""Pixels of the decoded pictures that requests hold at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    _Pictures = list[Image]
else:
    _Pictures = list


class HeldPictures(_Pictures):
    """Decoded pictures of a request, whose pixels count until they are released or nothing refers to them."""

    _give_back: Callable[[], object]

    def release(self) -> None:
        """Frees the pictures, and gives their pixels back; once is as good as often."""
        self.clear()
        self._give_back()

    def __reduce__(self) -> tuple[Any, ...]:
        """Becomes a list in another process, which has a budget of its own."""
        return list, (list(self),)


class PixelBudget:
    """Pixels that may be decoded at a time; requests wait for them in their order.

    Args:
        most: pixels; a request that alone has more waits until no other holds any.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._turn = asyncio.Lock()  # whose waiters are woken in order
        self._freed = asyncio.Event()

    async def hold(self, pixels: int) -> HeldPictures:
        """Waits until so many pixels may be decoded; returns an empty list for the pictures."""
        async with self._turn:
            while self._held and self._held + pixels > self._most:
                self._freed.clear()
                await self._freed.wait()
            self._held += pixels
        pictures = HeldPictures()
        loop = asyncio.get_running_loop()
        end = weakref.finalize(pictures, self._give_back_from_anywhere, loop, pixels)
        end.atexit = False
        pictures._give_back = end
        return pictures

    def _give_back_from_anywhere(self, loop: asyncio.AbstractEventLoop, pixels: int) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(self._give_back, pixels)

    def _give_back(self, pixels: int) -> None:
        self._held -= pixels
        self._freed.set()


def release_pictures(prompt: dict[str, Any]) -> None:
    """Frees the pictures of a prompt that has been read."""
    pictures = (prompt.pop("multi_modal_data", None) or {}).get("image")
    if isinstance(pictures, HeldPictures):
        pictures.release()
