"""Decode steps of two tensor parallel ranks in two network namespaces, beside ranks that share memory.

    sudo python -m bench.network [--shape 1b] [--rate 1gbit] [--rounds 3]

The namespaces are connected by a pair of virtual interfaces; ``--rate`` limits both by a token bucket.  Each
rank has a core.  Ranks on the network and ranks that share memory take turns.  Prints a JSON line: medians of
a step and of an exchange of 4 KB, and the step that the link predicts, which is the step of ranks that share
memory, and for every exchange its latency and its bytes at the rate.  Needs root, ``ip`` and ``tc``.
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
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

import torch_armllm  # noqa: F401  registers the format of saved models
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
def namespaces(rate: str | None) -> Iterator[None]:
    """Connects two network namespaces, ``10.9.0.1`` and ``10.9.0.2``."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
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


def step_ms(folder: str) -> float:
    """Returns the milliseconds of a decode step of two ranks: the first half of the steps is not counted."""
    settings = {"skip_tokenizer_init": True, "progress": False, "speculative_config": None, "threads": 1}
    llm = LLM(folder, tensor_parallel_size=2, kv_cache_memory=64 << 20, **settings)
    engine, seconds = llm.llm_engine, []
    params = SamplingParams(temperature=0.0, max_tokens=2 * _TOKENS, ignore_eos=True)
    engine.add_request("0", list(range(10, 26)), params)
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds[_TOKENS:])


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


def _measured(arguments: list[str], port: int | None) -> float:
    """Returns the number that this program prints, on two ranks."""
    own = [sys.executable, "-m", "bench.network", *arguments]
    if port is None:
        return float(subprocess.run(own, capture_output=True, text=True, check=True).stdout.split()[-1])
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
    return float(printed.split()[-1])


def _bits_a_second(rate: str | None) -> float:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float("inf") if rate is None else float(rate[:-4]) * units[rate[-4:]]


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="1b", help="a dense model of bench.peers.shapes")
    parser.add_argument("--rate", help="such as 1gbit; default: no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--exchange", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step or options.exchange:
        torch.set_num_threads(1)
        print(step_ms(options.step) if options.step else exchange_us())
        return
    config = AutoConfig.for_model(**SHAPES[options.shape].config)
    exchanged = [config.hidden_size, config.hidden_size, config.intermediate_size, config.hidden_size]
    with tempfile.TemporaryDirectory() as folder, namespaces(options.rate):
        save_random_model(config, Path(folder))
        exchange = _measured(["--exchange"], _PORT)
        pairs = []
        for number in range(options.rounds):
            shared = _measured(["--step", folder], None)
            pairs.append((shared, _measured(["--step", folder], _PORT + 1 + number)))
    memory, network = (median(each) for each in zip(*pairs, strict=True))
    count = config.num_hidden_layers * len(exchanged) + 1
    received = config.num_hidden_layers * sum(exchanged)  # half of each row, in two bytes an element
    predicted = memory + count * exchange / 1e3 + 8e3 * received / _bits_a_second(options.rate)
    found = {"shared memory": memory, "network": network, "predicted": predicted}
    rounded = {f"{name}, ms": round(value, 2) for name, value in found.items()}
    print(
        json.dumps(
            {"shape": options.shape, "rate": options.rate, "exchange, us": round(exchange, 1)} | rounded
        )
    )


if __name__ == "__main__":
    main()
