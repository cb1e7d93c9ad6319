"""Disconnecting clients: their requests end at once and free everything."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import httpx
import pytest

from tests.support.server_live import Live, slowed, until
from torch_armllm.llm.async_llm import AsyncLLM

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, LONG), (TEXT, {"prompt": ["a", "b", "c"], "max_tokens": 400, "ignore_eos": True})],
)
def test_disconnect_frees_the_request(
    server: Live, tiny_llm: AsyncLLM, path: str, body: dict[str, Any], streamed: bool
) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.base) as client:
            asking = asyncio.ensure_future(_read(client, path, {**body, "stream": streamed}))
            while not tiny_llm.llm_engine.has_unfinished_requests():
                assert not asking.done()
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    with slowed(tiny_llm, 0.05):  # twenty seconds to the end
        asyncio.run(leave())
        until(lambda: server.idle)


async def _read(client: httpx.AsyncClient, path: str, body: dict[str, Any], most: int = 10**6) -> int:
    """Returns the number of received events."""
    count = 0
    async with client.stream("POST", path, json=body, timeout=60) as got:
        async for line in got.aiter_lines():
            count += line.startswith("data: ")
            if count >= most:
                break
    return count


def test_many_clients_disconnect_at_any_time(server: Live) -> None:
    """Some clients wait, some leave during the stream, some before it; every response comes once."""
    draw = random.Random(0)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        body = {
            "prompt": f"question {number}",
            "max_tokens": draw.randrange(1, 30),
            "stream": draw.random() < 0.5,
            "ignore_eos": True,
            "temperature": 0,
        }
        fate = draw.choice(["stays", "leaves", "is cancelled"])
        if fate == "stays" and not body["stream"]:
            got = (await client.post(TEXT, json=body, timeout=60)).json()
            assert len(got["choices"]) == 1
            assert got["usage"]["completion_tokens"] == body["max_tokens"]
        elif fate == "is cancelled":
            task = asyncio.ensure_future(_read(client, TEXT, body))
            await asyncio.sleep(draw.random() * 0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await _read(client, TEXT, body, 10**6 if fate == "stays" else 2)
        return fate

    async def run() -> None:
        seats = asyncio.Semaphore(24)
        async with httpx.AsyncClient(base_url=server.base) as client:

            async def seated(number: int) -> str:
                async with seats:
                    return await one(client, number)

            fates = await asyncio.gather(*map(seated, range(200)))
        assert {fates.count(fate) > 20 for fate in ("stays", "leaves", "is cancelled")} == {True}

    asyncio.run(run())
    until(lambda: server.idle)
    until(lambda: server.connections == 0)
    assert server.llm.llm_engine.stats.gauges().running == 0
    assert not server.llm._thread._streams
    gc.collect()
