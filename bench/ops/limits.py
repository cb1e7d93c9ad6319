"""The physical limits of this machine: read bandwidth and multiplications per second."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from bench.ops.timing import ROUNDS, on_huge_pages

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build/bench"
READ_BYTES = 512 << 20
"""Far more than any cache."""


def cpu_name() -> str:
    """Returns the CPU's name as the system reports it."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return match[1].strip() if match else platform.machine()


def machine_line() -> str:
    """Returns the CPU, torch's threads, and what they read in a second."""
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} threads; a plain read has {bandwidth(threads) / 1e9:.1f} GB/s"


@cache
def library() -> ctypes.CDLL:
    """Returns ``limits.cpp``, compiled for this machine's CPU."""
    source, built = HERE / "limits.cpp", BUILD / "limits.so"
    if not built.exists() or built.stat().st_mtime < source.stat().st_mtime:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise RuntimeError("no C++ compiler to measure the limits of this machine with; set CXX")
        BUILD.mkdir(parents=True, exist_ok=True)
        native = "-march=native" if os.uname().machine == "x86_64" else "-mcpu=native"
        command = [compiler, "-std=c++17", "-O3", native, "-shared", "-fPIC", str(source), "-o", str(built)]
        subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.read_memory.restype = None
    for name in ("multiply_int8", "multiply_bf16"):
        getattr(loaded, name).argtypes = [ctypes.c_int64]
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


@cache
def _memory() -> torch.Tensor:
    return on_huge_pages(torch.ones(READ_BYTES, dtype=torch.uint8))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


class Reader:
    """Reads memory that no cache holds, on torch's current threads; each call reads the next part."""

    def __init__(self, size: int = READ_BYTES // 4) -> None:
        self.threads = torch.get_num_threads()
        self.share = size // self.threads // 512 * 512
        self.start = 0

    def __call__(self) -> None:
        memory, read = _memory(), library().read_memory
        base = memory.data_ptr()
        if self.start + self.threads * self.share > READ_BYTES:
            self.start = 0
        parts = [base + self.start + i * self.share for i in range(self.threads)]
        self.start += self.threads * self.share
        if self.threads == 1:
            read(parts[0], self.share)
        else:
            list(_pool(self.threads).map(lambda part: read(part, self.share), parts))

    @property
    def bytes(self) -> int:
        return self.threads * self.share


def _rate(work: Callable[[], float], threads: int) -> float:
    """Returns units of work per second over all threads: the best round, since it is a limit."""
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        done = sum(_pool(threads).map(lambda _: work(), range(threads)))
        rates.append(done / (time.perf_counter() - start))
    return max(rates)


def bandwidth(threads: int) -> float:
    """Returns the bytes per second that a plain loop reads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    reader = Reader(READ_BYTES)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        reader()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return reader.bytes / min(times)


def int8_peak(threads: int) -> float:
    """Returns INT8 multiply-accumulates per second from registers; 0 without a compiler intrinsic."""
    return _rate(lambda: float(library().multiply_int8(1_000_000)), threads)


def bf16_peak(threads: int) -> float:
    """Returns the same for bfloat16."""
    return _rate(lambda: float(library().multiply_bf16(1_000_000)), threads)
