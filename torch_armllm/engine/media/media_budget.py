"""Bytes of the decoded media that requests hold at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class HeldMedia(dict[str, list[Any]]):
    """Decoded media of a request, whose bytes count until they are released or nothing refers to them."""

    _give_back: Callable[[], object]

    def release(self) -> None:
        """Frees the media, and gives their bytes back; once is as good as often."""
        for items in self.values():
            items.clear()
        self.clear()
        self._give_back()

    def __reduce__(self) -> tuple[Any, ...]:
        """Becomes a dictionary in another process, which has a budget of its own."""
        return dict, (dict(self),)


class MediaBudget:
    """Bytes that decoded media may take at a time; requests wait for them in their order.

    Args:
        most: bytes; a request that alone takes more waits until no other holds any.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._turn = asyncio.Lock()  # whose waiters are woken in order
        self._freed = asyncio.Event()

    async def hold(self, nbytes: int) -> HeldMedia:
        """Waits until so many bytes may be decoded; returns an empty dictionary for the media."""
        async with self._turn:
            while self._held and self._held + nbytes > self._most:
                self._freed.clear()
                await self._freed.wait()
            self._held += nbytes
        media = HeldMedia()
        loop = asyncio.get_running_loop()
        end = weakref.finalize(media, self._give_back_from_anywhere, loop, nbytes)
        end.atexit = False
        media._give_back = end
        return media

    def _give_back_from_anywhere(self, loop: asyncio.AbstractEventLoop, nbytes: int) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(self._give_back, nbytes)

    def _give_back(self, nbytes: int) -> None:
        self._held -= nbytes
        self._freed.set()


def release_media(prompt: dict[str, Any]) -> None:
    """Frees the media of a prompt that has been read."""
    media = prompt.pop("multi_modal_data", None)
    if isinstance(media, HeldMedia):
        media.release()
