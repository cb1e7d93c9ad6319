"""The engine's thread: errors of one request, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from torch_armllm.engine.engine_protocol import Engine
from torch_armllm.engine.engine_thread import EngineDeadError, EngineThread, OutputStream
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest


class PanicException(BaseException):
    """As PyO3 raises it: in a class of each library, and no `Exception`."""


def request(name: str) -> NewRequest:
    return NewRequest(name, "", SamplingParams())


class FailingEngine(Engine[NewRequest]):
    """An engine that raises when it adds a request."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_request(self, new: NewRequest) -> None:
        if new.request_id != "good":
            raise self.error

    def abort_request(self, request_ids: str | Iterable[str]) -> list[Any]:
        return []

    def step(self) -> list[Any]:
        return []

    def has_unfinished_requests(self) -> bool:
        return False


def _run(error: BaseException, work: Callable[[EngineThread], Any]) -> Any:
    async def main() -> Any:
        thread = EngineThread(FailingEngine(error))
        try:
            return await asyncio.wait_for(work(thread), 20)
        finally:
            thread.stop()

    return asyncio.run(main())


def test_a_panic_is_the_error_of_its_request_alone() -> None:
    async def work(thread: EngineThread) -> None:
        stream = OutputStream(None)
        thread.add(request("bad"), stream)
        with pytest.raises(ValueError, match="gives up: over the limit"):
            await stream.get()

        def panic() -> None:
            raise PanicException("over the limit")

        with pytest.raises(ValueError, match="gives up: over the limit"):
            await asyncio.wrap_future(thread.call(panic))
        thread.add(request("good"), OutputStream(None))
        assert await asyncio.wrap_future(thread.call(lambda: 5)) == 5

    _run(PanicException("over the limit\nbacktrace"), work)


def test_everybody_hears_of_the_end_of_the_engine() -> None:
    """The one whose request has ended it, and those behind it in the same turn, too."""

    async def work(thread: EngineThread) -> None:
        entered = asyncio.Event()
        loop = asyncio.get_running_loop()
        held: Any = []
        thread.call(lambda: (loop.call_soon_threadsafe(entered.set), _wait(held)))
        await entered.wait()  # what follows is read in one turn
        first, second = OutputStream(None), OutputStream(None)
        thread.add(request("bad"), first)
        thread.add(request("good"), second)
        call = thread.call(lambda: None)
        held.append(True)
        for stream in (first, second):
            with pytest.raises(EngineDeadError):
                await stream.get()
        with pytest.raises(EngineDeadError):
            await asyncio.wrap_future(call)

    _run(SystemExit(), work)


def test_the_caller_whose_work_ends_the_engine_hears_of_it() -> None:
    async def work(thread: EngineThread) -> None:
        def end() -> None:
            raise SystemExit

        with pytest.raises(EngineDeadError):
            await asyncio.wrap_future(thread.call(end))

    _run(SystemExit(), work)


def _wait(held: list[Any]) -> None:
    while not held:
        pass
