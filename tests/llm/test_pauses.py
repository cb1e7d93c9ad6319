"""`sleep`, `reset_prefix_cache` and metrics of `LLM`; pauses and health of `AsyncLLM`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_server import checkpoint
from torch_armllm.engine.engine_thread import PauseMode
from torch_armllm.engine.errors import RequestAbortedError
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.reports.metrics import Counter, Gauge
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm.async_llm import AsyncLLM, EngineDeadError
from torch_armllm.llm.llm import LLM

PROMPT = list(range(3, 100))
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, progress=False, kv_cache_memory=16 << 20)


@pytest.fixture
def async_llm(folder: str) -> Iterator[AsyncLLM]:
    made = AsyncLLM(folder, progress=False, kv_cache_memory=16 << 20)
    yield made
    made.shutdown()


def ask(llm: LLM) -> RequestOutput:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def test_reset_prefix_cache(llm: LLM) -> None:
    first = ask(llm)
    assert ask(llm).num_cached_tokens > 0
    free = llm.llm_engine.scheduler.blocks.free
    assert llm.reset_prefix_cache() is True
    assert llm.llm_engine.scheduler.blocks.free == free
    again = ask(llm)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_reset_prefix_cache_while_a_request_runs(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    assert llm.reset_prefix_cache() is False
    with pytest.raises(ValueError, match="^this LLM is generating; finish that first$"):
        llm.sleep()
    stream.close()
    assert llm.reset_prefix_cache() is True


def test_reset_prefix_cache_without_one(folder: str) -> None:
    llm = LLM(folder, progress=False, kv_cache_memory=1 << 20, enable_prefix_caching=False)
    ask(llm)
    assert llm.reset_prefix_cache() is True


def test_sleep_gives_the_cache_back(llm: LLM) -> None:
    first = ask(llm)
    for tensor in llm.llm_engine.runner.executor.caches.tensors:
        tensor.view(-1).fill_(1)
    before = resident()
    llm.sleep()
    assert before - resident() > 8 << 20  # of 16 MB
    with pytest.raises(ValueError, match="^this LLM sleeps: call wake_up first$"):
        ask(llm)
    llm.wake_up()
    again = ask(llm)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    with pytest.raises(ValueError, match=r"^sleep\(level=2\) would discard the weights"):
        llm.sleep(level=2)


def test_sleep_while_a_request_runs_without_a_prefix_cache(folder: str) -> None:
    llm = LLM(folder, progress=False, kv_cache_memory=1 << 20, enable_prefix_caching=False)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    assert llm.reset_prefix_cache() is False
    with pytest.raises(ValueError, match="^this LLM is generating; finish that first$"):
        llm.sleep()
    stream.close()


def test_metrics(llm: LLM, folder: str) -> None:
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    ask(llm)
    found = {metric.name: metric for metric in llm.get_metrics()}
    tokens = found["vllm:generation_tokens"]
    assert isinstance(tokens, Counter) and tokens.value - before["vllm:generation_tokens"] == 5
    running = found["vllm:num_requests_running"]
    assert isinstance(running, Gauge) and running.value == 0
    labels = ("model_name", folder), ("engine", "0")
    assert {tuple(metric.labels.items()) for metric in found.values()} == {labels}


def test_health(async_llm: AsyncLLM) -> None:
    asyncio.run(async_llm.check_health())
    async_llm.shutdown()
    with pytest.raises(EngineDeadError, match="^the engine was shut down$"):
        asyncio.run(async_llm.check_health())


def test_sleep_beside_requests(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        expected = (await tokens_of(async_llm, "alone", 5)).outputs[0].token_ids
        allowed = AllowedSteps(async_llm, 5)
        first = asyncio.create_task(tokens_of(async_llm, "first"))
        await started(async_llm)
        for tensor in async_llm.llm_engine.runner.executor.caches.tensors:
            tensor.view(-1).fill_(1)
        before = resident()
        await async_llm.sleep()
        assert before - resident() > 8 << 20  # of 16 MB
        assert (await first).outputs[0].finish_reason == "abort"
        assert await async_llm.is_sleeping()
        allowed.count = float("inf")
        second = asyncio.create_task(tokens_of(async_llm, "second", 5))
        await asyncio.sleep(0.05)
        assert not second.done()
        await async_llm.wake_up()
        assert not await async_llm.is_sleeping()
        assert (await second).outputs[0].token_ids == expected
        with pytest.raises(ValueError) as refused:
            await async_llm.sleep(2)
        assert str(refused.value) == (
            "sleep(level=2) would discard the weights, which the disk gives back in seconds: delete this LLM "
            "and make another, or give level=1"
        )
        with pytest.raises(ValueError) as refused:
            await async_llm.sleep(mode="keep")
        assert str(refused.value) == (
            "mode is 'keep', and sleep gives the cache of kept requests back: give wait"
        )
        allowed = AllowedSteps(async_llm, 5)
        kept = asyncio.create_task(tokens_of(async_llm, "kept"))
        await started(async_llm)
        await async_llm.pause_generation(mode="keep")
        allowed.count = float("inf")
        with pytest.raises(ValueError) as refused:
            await async_llm.sleep(mode="wait")
        await async_llm.resume_generation()
        await kept

    asyncio.run(main())


class AllowedSteps:
    """Holds an engine after a number of steps, so that no request ends before a test wants it to."""

    def __init__(self, llm: AsyncLLM, count: float) -> None:
        self.count = count
        self._computed = 0
        self._step = llm.llm_engine.step
        llm.llm_engine.step = self._compute  # type: ignore[method-assign]

    def _compute(self) -> list[RequestOutput]:
        if self._computed >= self.count:
            time.sleep(0.001)
            return []
        self._computed += 1
        return self._step()


async def tokens_of(llm: AsyncLLM, name: str, count: int = 400) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    last = None
    async for output in llm.generate([5, 6, 7], params, name):
        last = output
    assert last is not None
    return last


async def started(llm: AsyncLLM) -> None:
    while not llm.llm_engine.stats.gauges().running:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pauses(async_llm: AsyncLLM, mode: PauseMode) -> None:
    allowed = AllowedSteps(async_llm, 5)

    async def main() -> None:
        first = asyncio.create_task(tokens_of(async_llm, "first"))
        await started(async_llm)
        assert not await async_llm.is_paused()
        pausing = asyncio.create_task(async_llm.pause_generation(mode=mode))
        await asyncio.sleep(0)
        second = asyncio.create_task(tokens_of(async_llm, "second", 3))
        allowed.count = float("inf")
        await pausing
        assert await async_llm.is_paused()
        steps = async_llm.stats.totals.steps
        await asyncio.sleep(0.05)
        assert async_llm.stats.totals.steps == steps
        assert not second.done()
        if mode == "keep":
            assert not first.done()
        else:
            completion = (await first).outputs[0]
            assert completion.finish_reason == ("abort" if mode == "abort" else "length")
            assert (len(completion.token_ids) == 400) == (mode == "wait")
        await async_llm.resume_generation()
        assert not await async_llm.is_paused()
        assert len((await second).outputs[0].token_ids) == 3
        if mode == "keep":
            assert len((await first).outputs[0].token_ids) == 400

    asyncio.run(main())


def test_requests_end_during_a_pause(async_llm: AsyncLLM) -> None:
    AllowedSteps(async_llm, 5)

    async def main() -> None:
        first = asyncio.create_task(tokens_of(async_llm, "first"))
        await started(async_llm)
        pausing = asyncio.create_task(async_llm.pause_generation(mode="wait"))
        while not await async_llm.is_paused():
            await asyncio.sleep(0.001)
        held = asyncio.create_task(tokens_of(async_llm, "held"))
        while not async_llm._thread._held:
            await asyncio.sleep(0.001)
        await async_llm.abort("held")  # it waits for the end of the pause, and has no output yet
        with pytest.raises(RequestAbortedError, match="^the request 'held' was aborted$"):
            await held
        await async_llm.abort("first")
        assert (await first).outputs[0].finish_reason == "abort"
        await pausing
        kept = asyncio.create_task(tokens_of(async_llm, "kept"))
        await asyncio.sleep(0.02)
        await async_llm.abort("kept")
        assert (await kept).outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_a_shutdown_ends_a_pause(async_llm: AsyncLLM) -> None:
    AllowedSteps(async_llm, 5)

    async def main() -> None:
        first = asyncio.create_task(tokens_of(async_llm, "first"))
        await started(async_llm)
        pausing = asyncio.create_task(async_llm.pause_generation(mode="wait"))
        await asyncio.sleep(0.005)
        held = asyncio.create_task(tokens_of(async_llm, "held"))
        await asyncio.sleep(0.005)
        async_llm.shutdown()
        for waiting in (first, pausing, held):
            with pytest.raises(EngineDeadError, match="^the engine was shut down$"):
                await waiting

    asyncio.run(main())


def test_an_unknown_mode(async_llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="^mode is 'stop': give abort, wait or keep$"):
        asyncio.run(async_llm.pause_generation(mode="stop"))  # type: ignore[arg-type]


def test_reset_of_an_async_engine(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        assert (await tokens_of(async_llm, "a", 3)).num_cached_tokens == 0
        assert await async_llm.reset_prefix_cache() is True

    asyncio.run(main())
