"""Streams of many requests, and their end after errors, aborts and shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.stand_in import StubEngine, StubModel
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.llm import base
from torch_armllm.llm.async_llm import AsyncLLM, EngineDeadError, StepFailedError

Make = Callable[..., AsyncLLM]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[AsyncLLM] = []

    def make(**options: Any) -> AsyncLLM:
        engine = StubEngine(**options)
        monkeypatch.setattr(base, "load_engine", lambda *a, **k: (engine, StubModel(), None))
        made.append(AsyncLLM("none"))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def params(most: int, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> SamplingParams:
    return SamplingParams(max_tokens=most, output_kind=kind)


async def read(llm: AsyncLLM, prompt: Any, settings: SamplingParams, name: str = "") -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, settings, name)]


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.001)


def test_outputs_grow_until_finished(make: Make) -> None:
    llm = make(seconds=0.005)
    outputs = asyncio.run(read(llm, "ab", params(4)))
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "abab"
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_slow_reader_skips_cumulative_outputs_only(make: Make, kind: RequestOutputKind) -> None:
    llm = make()

    async def slowly() -> list[str]:
        texts = []
        async for output in llm.generate("abc", params(50, kind)):
            texts.append(output.outputs[0].text)
            await asyncio.sleep(0.02)
        return texts

    texts = asyncio.run(slowly())
    whole = ("abc" * 17)[:50]
    assert ("".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]) == whole
    assert len(texts) <= (50 if kind is RequestOutputKind.DELTA else 10)


def test_thousands_of_concurrent_requests(make: Make) -> None:
    llm = make(max_running=64)

    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(llm, [i, i + 1], params(3), f"r{i}") for i in range(3000)))

    for i, outputs in enumerate(asyncio.run(all_of_them())):
        assert outputs[-1].outputs[0].token_ids == [i, i + 1, i]
        assert all(output.request_id == f"r{i}" for output in outputs)


def test_rejected_requests_raise_at_the_caller(make: Make) -> None:
    llm = make(seconds=0.02)

    async def main() -> None:
        running = asyncio.create_task(read(llm, "ab", params(10**9), "one"))
        await until(lambda: "one" in llm.llm_engine.served)
        with pytest.raises(ValueError, match="no token"):
            await read(llm, [], params(3))
        with pytest.raises(ValueError, match="'one' is running already"):
            await read(llm, "x", params(3), "one")
        await llm.abort("one")
        assert (await running)[-1].outputs[0].finish_reason == "abort"
        assert (await read(llm, "x", params(1), "one"))[-1].finished

    asyncio.run(main())


def test_closing_a_generator_aborts_its_request(make: Make) -> None:
    llm = make(seconds=0.001)

    async def main() -> None:
        generator = llm.generate("ab", params(10**9), "left")
        async for _ in generator:
            break
        await generator.aclose()
        await until(lambda: not llm.llm_engine.has_unfinished_requests())
        task = asyncio.create_task(read(llm, "ab", params(10**9), "cancelled"))
        await until(lambda: "cancelled" in llm.llm_engine.served)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not llm.llm_engine.has_unfinished_requests())

    asyncio.run(main())


def test_abort_returns_the_output_so_far(make: Make) -> None:
    llm = make(seconds=0.001)

    async def main() -> None:
        task = asyncio.create_task(read(llm, "ab", params(10**9), "x"))
        await until(lambda: llm.llm_engine.lengths.get("x", 0) > 2)
        await llm.abort("x")
        last = (await task)[-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        assert last.outputs[0].text.startswith("ab")
        await llm.abort("unknown")

    asyncio.run(main())


def test_late_abort_spares_a_new_request_with_the_same_id(make: Make) -> None:
    llm = make(seconds=0.02)

    async def main() -> None:
        first = llm.generate("ab", params(2), "name")
        await anext(first)
        await until(lambda: not llm.llm_engine.has_unfinished_requests())
        second = asyncio.create_task(read(llm, "cd", params(4), "name"))
        await until(lambda: llm.llm_engine.served == ["name", "name"])
        await first.aclose()
        assert (await second)[-1].outputs[0].text == "cdcd"

    asyncio.run(main())


def test_engine_error_reaches_all_requests(make: Make) -> None:
    llm = make(seconds=0.001)
    llm.llm_engine.fail_at = 5

    async def main() -> None:
        tasks = [asyncio.create_task(read(llm, "ab", params(100))) for _ in range(20)]
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, EngineDeadError)
            assert isinstance(found.__cause__, RuntimeError)
            assert "out of order" in str(found)
        assert llm.errored
        assert "out of order" in str(llm.dead_error)
        with pytest.raises(EngineDeadError, match="out of order"):
            await read(llm, "ab", params(1))
        await llm.abort("anything")

    asyncio.run(main())


def test_failed_step_ends_only_its_requests(make: Make) -> None:
    llm = make(seconds=0.01, max_running=3)
    llm.llm_engine.fail_once_at = 5

    async def main() -> None:
        tasks = [asyncio.create_task(read(llm, "ab", params(20))) for _ in range(5)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [error for error in found if isinstance(error, StepFailedError)]
        assert len(failed) == len(set(map(id, failed))) == 3
        assert all("bad luck" in str(e) and isinstance(e.__cause__, RuntimeError) for e in failed)
        assert sum(isinstance(outputs, list) and outputs[-1].finished for outputs in found) == 2
        assert not llm.errored and (await read(llm, "ab", params(2)))[-1].outputs[0].text == "ab"

    asyncio.run(main())


def test_shutdown_raises_in_waiting_requests(make: Make) -> None:
    llm = make(seconds=0.001)

    async def main() -> None:
        task = asyncio.create_task(read(llm, "ab", params(10**9)))
        await until(lambda: llm.llm_engine.steps > 3)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        assert not llm.llm_engine.has_unfinished_requests()
        with pytest.raises(EngineDeadError, match="shut down"):
            await read(llm, "ab", params(1))

    asyncio.run(main())


def test_deleting_the_llm_ends_the_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(base, "load_engine", lambda *a, **k: (StubEngine(), StubModel(), None))
    llm = AsyncLLM("none")
    asyncio.run(read(llm, "ab", params(2)))
    own = set(threading.enumerate()) - before
    assert own
    del llm
    gc.collect()
    assert not own & set(threading.enumerate())


def test_requests_of_a_closed_event_loop_are_dropped(make: Make) -> None:
    llm = make(seconds=0.001)

    async def leave() -> None:
        generator = llm.generate("ab", params(10**9), "lost")
        await anext(generator)
        lost.append(generator)

    lost: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()

    async def main() -> None:
        await until(lambda: "lost" not in llm.llm_engine.requests)
        assert (await read(llm, "ab", params(2)))[-1].finished

    asyncio.run(main())


def test_engine_thread_sleeps_while_idle(make: Make) -> None:
    llm = make()
    asyncio.run(read(llm, "ab", params(2)))
    thread = llm._thread._thread.ident
    assert thread is not None

    def is_asleep() -> bool:
        code = sys._current_frames()[thread].f_code
        return (code.co_filename, code.co_name) == (threading.__file__, "wait")

    asyncio.run(until(is_asleep))
    assert llm.llm_engine.steps == 2


def test_work_between_steps(make: Make) -> None:
    llm = make(seconds=0.005)

    async def run() -> None:
        asking = asyncio.ensure_future(read(llm, "ab", params(10**9), "x"))
        names = [await llm.between_steps(lambda: threading.current_thread().name) for _ in range(3)]
        assert names == ["armllm-engine"] * 3
        assert not asking.done()
        with pytest.raises(ZeroDivisionError):
            await llm.between_steps(lambda: 1 // 0)
        await llm.abort("x")
        assert (await asking)[-1].outputs[0].text.startswith("ab")
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.between_steps(lambda: 1)

    asyncio.run(run())


def test_waiting_work_raises_at_shutdown(make: Make) -> None:
    llm = make(seconds=0.2)
    llm.llm_engine.fail_at = 1  # type: ignore[attr-defined]

    async def run() -> None:
        asking = asyncio.ensure_future(read(llm, "ab", params(30)))
        await until(llm.llm_engine.has_unfinished_requests)
        with pytest.raises(EngineDeadError):
            await llm.between_steps(lambda: 1)
        with pytest.raises(EngineDeadError):
            await asking

    asyncio.run(run())


def test_forked_process_raises_instead_of_waiting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    asyncio.run(read(llm, "ab", params(2)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineDeadError, match="was forked from it: start this process with .*spawn"):
            asyncio.run(read(llm, "ab", params(2)))
        asyncio.run(llm.abort("gone"))
        llm._thread.stop()
    assert asyncio.run(read(llm, "ab", params(2)))[-1].finished
