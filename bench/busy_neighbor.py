"""Decode rate next to a process that keeps one core busy.

    python -m bench.busy_neighbor [--model smollm2] [--seconds 4] [--threads N]

Decodes one sequence in turn alone and next to a busy loop.  Prints the medians of both rates and their
ratio.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.llm_engine import LLMEngine

_ROUNDS = 3
_BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    """Measures both rates in turn and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    engine = LLM(
        options.model,
        quantization="int4",
        disable_log_stats=True,
        speculative_config=None,
        progress=False,
        threads=options.threads,
        max_model_len=2048,
    ).llm_engine
    alone, contended = [], []
    for _ in range(_ROUNDS):
        rate(engine, 1.0)  # lets the thread team notice that it has all cores again
        alone.append(rate(engine, options.seconds))
        neighbor = subprocess.Popen(_BUSY)
        try:
            time.sleep(0.5)
            contended.append(rate(engine, options.seconds))
        finally:
            neighbor.kill()
            neighbor.wait()
    one, other = statistics.median(alone), statistics.median(contended)
    print(f"alone {one:.1f} tok/s, next to a busy process {other:.1f} tok/s: {other / one:.2f}")


def rate(engine: LLMEngine, seconds: float) -> float:
    """Decode one sequence after a prompt of 128 tokens; return tokens a second."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    tokens, spent = 0, 0.0
    while spent < seconds:
        engine.add_request("decode", list(range(100, 228)), params)
        engine.step()
        began = time.perf_counter()
        for _ in range(256):
            engine.step()
        spent += time.perf_counter() - began
        tokens += 256
        engine.abort_request("decode")
    return tokens / spent


if __name__ == "__main__":
    main()
