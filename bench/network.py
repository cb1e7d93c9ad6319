"""Decode steps of two processes in two network namespaces, beside processes of one machine.

    sudo python -m bench.network [--shape 1b] [--stages] [--rate 1gbit] [--delay 100] [--rounds 3]

The processes are tensor parallel ranks, or stages of a pipeline with ``--stages``.  The namespaces are
connected by a pair of virtual interfaces; ``--rate`` limits both by a token bucket, and ``--delay`` holds
each frame for so many microseconds.  Each process has a core.  Processes on the network and those of one
machine take turns.  Prints a JSON line: medians of a step and of an exchange of 4 KB, and the step that the
link predicts: that of one machine, and for every exchange its latency and its bytes at the rate.  The tokens
have to be the same.  Needs root, ``ip`` and ``tc``, and ``/dev/net/tun`` for a delay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from transformers import AutoConfig

import torch_armllm  # noqa: F401  registers the format of saved models
from bench.delayed_link import DelayedLink
from bench.peers.shapes import SHAPES
from torch_armllm import LLM, SamplingParams
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.ops.collective import gather_columns
from torch_armllm.parallel.connections import Connections
from torch_armllm.parallel.network import NetworkExchange

NAMES = ("armllm-0", "armllm-1")
_TOKENS = 64
_EXCHANGES = 500
_PORT = 29500


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def namespaces(rate: str | None, delay: float) -> Iterator[None]:
    """Connects two network namespaces, ``10.9.0.1`` and ``10.9.0.2``."""
    if delay == 0.0:
        _run("ip", "link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
    with DelayedLink(NAMES, delay) if delay > 0.0 else nullcontext():
        yield from _namespaces(rate)


def _namespaces(rate: str | None) -> Iterator[None]:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        _run("ip", "netns", "add", name)
    try:
        for number, name in enumerate(NAMES):
            inside = ("ip", "netns", "exec", name)
            _run("ip", "link", "set", name, "netns", name)
            _run(*inside, "ip", "addr", "add", f"10.9.0.{number + 1}/24", "dev", name)
            for link in (name, "lo"):
                _run(*inside, "ip", "link", "set", link, "up")
            if rate is not None:
                limit = ("root", "tbf", "rate", rate, "burst", "16k", "latency", "50ms")
                _run(*inside, "tc", "qdisc", "add", "dev", name, *limit)
        yield
    finally:
        for name in NAMES:
            _run("ip", "netns", "del", name)


def step_ms(folder: str, setting: str) -> tuple[float, int]:
    """Returns the milliseconds of a decode step of two processes, and a number that says its tokens.

    The first half of the steps is not counted.
    """
    settings = {"skip_tokenizer_init": True, "progress": False, "speculative_config": None, "threads": 1}
    llm = LLM(folder, kv_cache_memory=64 << 20, **{setting: 2}, **settings)
    engine, seconds, tokens = llm.llm_engine, [], [0]
    params = SamplingParams(temperature=0.0, max_tokens=2 * _TOKENS, ignore_eos=True)
    engine.add_request("0", list(range(10, 26)), params)
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        changed = engine.step()
        while not changed:  # a step of a pipeline ends in a later call
            changed = engine.step()
        seconds.append(time.perf_counter() - began)
        tokens = changed[0].outputs[0].token_ids
    return 1e3 * median(seconds[_TOKENS:]), crc32(repr(list(tokens)).encode())


def exchange_us() -> float:
    """Returns the microseconds of an exchange of 4 KB with the other rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    connections = Connections(rank, 2, None, 1, 60)
    network = NetworkExchange(rank, connections.sockets[0], 60)
    x, seconds = torch.randn(1, 512), []
    for _ in range(_EXCHANGES):
        began = time.perf_counter()
        gather_columns(x, network.communicator, [512, 512])
        seconds.append(time.perf_counter() - began)
    return 1e6 * median(seconds)


def _measured(arguments: list[str], port: int | None) -> list[float]:
    """Returns the numbers that this program prints at last, on two processes."""
    own = [sys.executable, "-m", "bench.network", *arguments]
    if port is None:
        return _last_line(subprocess.run(own, capture_output=True, text=True, check=True).stdout)
    started = []
    for rank, name in enumerate(NAMES):
        ranks = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{k: str(v) for k, v in ranks.items()}, "GLOO_SOCKET_IFNAME": name}
        environment["TORCHELASTIC_RUN_ID"] = "bench"
        command = ["ip", "netns", "exec", name, "taskset", "-c", str(rank), *own]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **streams))
    (printed, problems), _ = (each.communicate(timeout=300) for each in started)
    if not printed.split():
        raise RuntimeError(f"rank 0 failed: {problems[-2000:]}")
    return _last_line(printed)


def _last_line(printed: str) -> list[float]:
    return [float(number) for number in printed.strip().splitlines()[-1].split()]


def _bits_a_second(rate: str | None) -> float:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float("inf") if rate is None else float(rate[:-4]) * units[rate[-4:]]


def _exchanged(config: Any, stages: bool) -> tuple[int, float]:
    """Returns the number of a step's exchanges, and the bytes that a process receives."""
    hidden = config.hidden_size
    if stages:  # a row to the second stage, and one back
        return 2, 2 * 2 * hidden
    columns = [hidden, hidden, config.intermediate_size, hidden]
    # half of each row, in two bytes an element
    return config.num_hidden_layers * len(columns) + 1, config.num_hidden_layers * sum(columns)


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="1b", help="a dense model of bench.peers.shapes")
    parser.add_argument("--stages", action="store_true", help="a pipeline, in place of tensor parallel ranks")
    parser.add_argument("--rate", help="such as 1gbit; default: no limit")
    parser.add_argument("--delay", type=float, default=0.0, help="of each frame, in microseconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--exchange", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step or options.exchange:
        torch.set_num_threads(1)
        setting = "pipeline_parallel_size" if options.stages else "tensor_parallel_size"
        print(*(step_ms(options.step, setting) if options.step else [exchange_us()]))
        return
    config = AutoConfig.for_model(**SHAPES[options.shape].config)
    step = ["--stages"] if options.stages else []
    with tempfile.TemporaryDirectory() as folder, namespaces(options.rate, 1e-6 * options.delay):
        save_random_model(config, Path(folder))
        (exchange,) = _measured(["--exchange"], _PORT)
        pairs, every = [], set()
        for number in range(options.rounds):
            shared, tokens = _measured([*step, "--step", folder], None)
            ours, others = _measured([*step, "--step", folder], _PORT + 1 + number)
            pairs.append((shared, ours))
            every |= {tokens, others}
    if len(every) > 1:
        raise RuntimeError("the tokens differ")
    alone, network = (median(each) for each in zip(*pairs, strict=True))
    count, received = _exchanged(config, options.stages)
    predicted = alone + count * exchange / 1e3 + 8e3 * received / _bits_a_second(options.rate)
    found = {"one machine": alone, "network": network, "predicted": predicted}
    rounded = {f"{name}, ms": round(value, 2) for name, value in found.items()}
    print(
        json.dumps(
            {
                "shape": options.shape,
                "rate": options.rate,
                "delay, us": options.delay,
                "exchange, us": round(exchange, 1),
            }
            | rounded
        )
    )


if __name__ == "__main__":
    main()
