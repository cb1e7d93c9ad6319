"""Worker threads pass errors to the caller, and compute the bits that the caller's thread computes."""

from __future__ import annotations

import subprocess
import sys

import torch

from torch_armllm.ops import norm

_REFUSED = """
import resource, sys, torch
from torch_armllm.ops.sample import sample
torch.set_num_threads(int(sys.argv[1]))
logits = torch.randn(8, 2 << 20)
rows = [torch.ones(8), torch.full((8,), 1 << 20), torch.full((8,), 0.9999), torch.zeros(8)]
counts = [torch.zeros(8, dtype=torch.long) for _ in range(2)]
sample(logits[:, :4096].contiguous(), *rows, *counts)  # starts the threads
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (2 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
for _ in range(3):
    try:
        sample(logits, *rows, *counts)
    except MemoryError:
        print("refused")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
one = sample(logits, *rows, *counts)[0]
torch.set_num_threads(1)
print("same", torch.equal(one, sample(logits, *rows, *counts)[0]))
"""


def test_refused_memory_is_an_error_of_the_call() -> None:
    for threads in ("1", "3"):
        command = [sys.executable, "-c", _REFUSED, threads]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("refused") == 3 and "same True" in done.stdout


def test_flushed_denormals_are_flushed_in_every_thread() -> None:
    """torch.set_flush_denormal changes the calling thread only."""
    threads = torch.get_num_threads()
    x, weight = torch.full((2000, 256), 1e-40), torch.ones(256)
    try:
        torch.set_num_threads(3)
        before = norm.rms_norm(x, weight, 1e-5)  # starts the threads
        assert before.count_nonzero() == before.numel()
        assert torch.set_flush_denormal(True)
        for _ in range(20):
            assert norm.rms_norm(x, weight, 1e-5).count_nonzero() == 0
        torch.set_flush_denormal(False)
        for _ in range(20):
            assert torch.equal(norm.rms_norm(x, weight, 1e-5), before)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
