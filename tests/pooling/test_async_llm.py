"""`AsyncLLM` with pooling models: concurrent requests, aborts, errors, priorities."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.pooling_folders import TEXTS, patched_model
from tests.support.tiny_server import tokenizer
from torch_armllm import LLM, AsyncLLM, PoolingParams
from torch_armllm.llm.async_llm import EngineDeadError, RequestAbortedError, StepFailedError


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    model = patched_model("embed")
    model.name_or_path = ""
    made = AsyncLLM(model, tokenizer(), max_num_seqs=2)
    yield made
    made.shutdown()


async def encode(llm: AsyncLLM, text: str, **options: Any) -> torch.Tensor:
    (output,) = [output async for output in llm.encode(text, **options)]
    return output.outputs.data


def held(llm: AsyncLLM) -> tuple[threading.Event, list[list[int]]]:
    """Makes batches wait for an event, and records their lengths."""
    engine: Any = llm.pooling_engine
    compute, event = engine.model.compute, threading.Event()
    batches: list[list[int]] = []

    def wait(inputs: Any) -> Any:
        batches.append([len(each.token_ids) for each in inputs])
        event.wait(20)
        return compute(inputs)

    engine.model.compute = wait
    return event, batches


def test_concurrent_requests_equal_offline_ones(llm: AsyncLLM) -> None:
    async def run() -> list[torch.Tensor]:
        return await asyncio.gather(*(encode(llm, text) for text in TEXTS))

    offline = LLM(patched_model("embed"), tokenizer(), progress=False).encode(TEXTS, use_tqdm=False)
    for found, wanted in zip(asyncio.run(run()), offline, strict=True):
        assert torch.equal(found, wanted.outputs.data)
    short = asyncio.run(encode(llm, "a", pooling_params=PoolingParams(dimensions=4), pooling_task="embed"))
    assert short.shape == (4,)


def test_priorities_and_aborts(llm: AsyncLLM) -> None:
    event, batches = held(llm)
    engine: Any = llm.pooling_engine

    async def run() -> None:
        first = asyncio.ensure_future(encode(llm, "a"))
        while not batches:
            await asyncio.sleep(0.001)
        late = asyncio.ensure_future(encode(llm, "late", priority=1))
        aborted = asyncio.ensure_future(encode(llm, "aborted", request_id="x"))
        canceled = asyncio.ensure_future(encode(llm, "canceled one"))
        soon = asyncio.ensure_future(encode(llm, "soon!", priority=-1))
        while len(llm._batches) < 5:
            await asyncio.sleep(0.001)
        with pytest.raises(ValueError, match="a request with the id 'x' is running"):
            await encode(llm, "b", request_id="x")
        await llm.abort("x")
        with pytest.raises(RequestAbortedError, match="the request 'x' was aborted"):
            await aborted
        canceled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await canceled
        event.set()
        await asyncio.gather(first, late, soon)

    asyncio.run(run())
    assert batches == [[1], [5, 4]]
    assert not engine.has_unfinished_requests() and not llm._batches and not llm._thread._streams


def test_errors(llm: AsyncLLM) -> None:
    engine: Any = llm.pooling_engine
    for text, options, message in (
        ("", {}, "this input has no tokens"),
        ("a", {"pooling_task": "classify"}, "does not compute 'classify'"),
        ("a", {"pooling_params": PoolingParams(dimensions=65)}, "dimensions is 65"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(encode(llm, text, **options))

    async def generate() -> None:
        async for _ in llm.generate("a"):
            pass

    with pytest.raises(ValueError, match="this model pools: call encode, or load it with runner='generate'"):
        asyncio.run(generate())

    def fail(inputs: Any) -> Any:
        raise MemoryError("no room")

    engine.model.compute, own = fail, engine.model.compute
    with pytest.raises(StepFailedError, match="no room"):
        asyncio.run(encode(llm, "a"))
    engine.model.compute = own
    assert asyncio.run(encode(llm, "a")).shape == (64,)
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        asyncio.run(encode(llm, "a"))
