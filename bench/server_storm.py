"""Leak check: a server's resources before and after clients that disconnect at random.

    python -m bench.server_storm [--model smollm2] [--requests 2000] [--at-once 24]

Serves the model from this process; the clients run in another process.  A first round of requests warms up
caches and buffers; a second round of different requests is measured.  Requests are chat and text
completions, streamed or not, with one or two outputs of 1 to 40 tokens.  The tokenizer caches the first
10,000 words that it encodes; they are encoded before.  Clients at random wait for the end, close the
connection after a few events, or disconnect at any moment, some in the middle of the request.  Prints JSON
lines: ``before`` and ``after`` with everything held (blocks, sequences, requests that hold the model,
tasks, sockets, Python objects, threads, bytes allocated by C and C++, resident bytes), and the counts in
between.  A client that waits and does not get each of its tokens once is counted under ``wrong``.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import gc
import json
import os
import sys
import time
from random import Random
from typing import Any

import httpx

from bench.patch_memory import memory

_MAX_TOKENS = 40
_WORDS_KEPT = 10_000


class _Allocated(ctypes.Structure):
    """The structure that glibc's ``mallinfo2`` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped"),
            *("usmblks", "fsmblks", "used", "free", "keepcost"),
        )
    ]


def request(draw: Random, number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a random request."""
    temperature = draw.choice([0.0, 0.8])
    body: dict[str, Any] = {
        "max_tokens": draw.randint(1, _MAX_TOKENS),
        "ignore_eos": True,
        "temperature": temperature,
        "stream": draw.random() < 0.6,
        "n": 2 if temperature and draw.random() < 0.2 else 1,
    }
    text = "Tell me about " + " ".join(draw.choice(["rivers", "moons", "bread", "iron"]) for _ in range(12))
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if draw.random() < 0.5:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": f"{number} {text}"}]}
    return "/v1/completions", {**body, "prompt": f"{text} {number}"}


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], events: int) -> int:
    """Send a request, read at most ``events`` events, and return the server's count of output tokens."""
    tokens = 0
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        if not body["stream"]:
            return int(json.loads(await response.aread())["usage"]["completion_tokens"])
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
                tokens = usage.get("completion_tokens", 0)
                events -= 1
            if events == 0:
                break
    return tokens


async def break_off(port: int, path: str, body: dict[str, Any], draw: Random) -> None:
    """Send part or all of a request and close the connection."""
    content = json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}"])
    request_bytes = head.encode() + b"\r\n\r\n" + content
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes[: draw.randint(1, len(request_bytes))])
    await writer.drain()
    writer.close()


async def one(client: httpx.AsyncClient, port: int, draw: Random, number: int) -> str:
    """Run a client; return how it ended."""
    path, body = request(draw, number)
    fate = draw.choice(["stays", "closes", "leaves", "leaves", "breaks off", "stays"])
    if fate == "stays":
        tokens = await ask(client, path, body, -1)
        return fate if tokens == body["n"] * body["max_tokens"] else "wrong"
    if fate == "closes":
        await ask(client, path, {**body, "stream": True}, draw.randint(1, 5))
    elif fate == "breaks off":
        await break_off(port, path, body, draw)
    else:
        asking = asyncio.ensure_future(ask(client, path, body, -1))
        await asyncio.sleep(draw.expovariate(5))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    return fate


async def storm(port: int, requests: int, at_once: int, seed: int) -> None:
    """Run all clients; print the number of clients by how they ended."""
    draw = Random(seed)
    slots = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once // 2)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as client:

        async def limited(number: int) -> str:
            async with slots:
                try:
                    return await one(client, port, Random(draw.random()), number)
                except httpx.HTTPError as error:
                    return type(error).__name__

        fates = await asyncio.gather(*map(limited, range(requests)))
    print(json.dumps(collections.Counter(fates)))


def sockets() -> int:
    """Return the number of open sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # of the listing itself
            continue
    return count


def allocated() -> int:
    """Return the bytes allocated by ``malloc``; 0 if the C library does not report them."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = _Allocated
    stats = ask()
    return int(stats.used + stats.mapped)


def held_resources(registry: Any) -> dict[str, int]:
    """Return everything that an idle server holds."""
    from torch_armllm.system.allocator import release_free_memory

    gc.collect()
    release_free_memory()
    served = registry.find(None)
    engine = served.llm.llm_engine
    blocks = engine.scheduler.blocks
    return {
        "blocks": blocks.num_blocks - blocks.free,
        "unfinished": int(engine.has_unfinished_requests()),
        "answers": served.admission.num_admitted,
        "in_use": int(not served.idle.is_set()),
        "tasks": len(asyncio.all_tasks()),
        "sockets": sockets(),
        "objects": len(gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "allocated_bytes": allocated(),
        "resident_bytes": memory("VmRSS"),
    }


async def serve(options: argparse.Namespace) -> None:
    """Serve, run two rounds of clients, and print everything held after each."""
    from torch_armllm.server.model_registry import ModelRegistry
    from torch_armllm.server.run import listen, make_server
    from torch_armllm.server.settings import ModelSettings, ServerSettings

    settings = ServerSettings()
    registry = ModelRegistry(settings)
    engine = {"kv_cache_memory": options.cache_mb << 20, "disable_log_stats": True}
    model = ModelSettings("model", options.model, engine)
    registry.register(registry.load_llm(model), model)
    for tensor in registry.find(None).llm.llm_engine.runner.cache:
        if tensor is not None:
            tensor.zero_()  # blocks take memory when they are first written
    tokenizer = registry.find(None).llm.get_tokenizer()
    for number in range(2 * _WORDS_KEPT):
        tokenizer(f"word {number:x}")
    with listen("127.0.0.1", 0, settings.write_timeout) as listening:
        server = make_server(registry)
        serving = asyncio.ensure_future(server.serve([listening]))
        for name in ("before", "after"):
            began = time.perf_counter()
            arguments = ["--port", str(listening.getsockname()[1]), "--at-once", str(options.at_once)]
            clients = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "bench.server_storm",
                    "--requests",
                    str(options.requests),
                    "--seed",
                    name,
                ),
                *arguments,
            )
            if await clients.wait():
                raise SystemExit("the clients failed")
            seconds = round(time.perf_counter() - began, 1)
            await asyncio.sleep(1)  # the server notices the disconnects
            print(
                json.dumps(
                    {name: held_resources(registry), "requests": options.requests, "seconds": seconds}
                ),
                flush=True,
            )
        server.should_exit = True
        await serving
    registry.close()


def main() -> None:
    """Runs the measurement, or the clients of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=24, help="clients")
    parser.add_argument("--cache-mb", type=int, default=256)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.port is None:
        asyncio.run(serve(options))
    else:
        asyncio.run(storm(options.port, options.requests, options.at_once, options.seed))


if __name__ == "__main__":
    main()
