"""Time between tokens of running sequences while a long prompt is prefilled.

    python -m bench.engine_stall [--model smollm2] [--prompt-len 8000] [--answers 4] [--ways paced]

A long prompt arrives while other sequences decode.  It is prefilled in chunks that fit into `max_step_time`
(``paced``), in equal chunks, or in one piece (``whole``).  Prints for each the median and the worst time
between two tokens of a running sequence, and the long prompt's TTFT, in ms.
"""

from __future__ import annotations

import argparse
import statistics
import time

from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.config import EngineConfig

_LEAD = 20
"""Steps before the long prompt comes, and after its first token."""


def main() -> None:
    """Measures each of the requested ways and prints a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt-len", type=int, default=8000)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step")
    parser.add_argument("--max-step-time", type=float, default=EngineConfig.max_step_time)
    parser.add_argument("--ways", default="paced,chunks,whole")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    for way in options.ways.split(","):
        gaps, first = measure(options, way)
        print(
            f"{way:>7}: between tokens {statistics.median(gaps):.1f} ms, at worst {max(gaps):.1f} ms; "
            f"the long prompt's first token after {first:.0f} ms"
        )


def measure(options: argparse.Namespace, way: str) -> tuple[list[float], float]:
    """Returns the times between tokens of the running sequences and the TTFT of the long prompt, in ms."""
    room = options.prompt_len + 64
    llm = LLM(
        options.model,
        quantization="int4",
        max_num_batched_tokens=room + options.answers if way == "whole" else options.chunk,
        max_model_len=room,
        max_step_time=options.max_step_time if way == "paced" else None,
        enable_chunked_prefill=way != "whole",
        disable_log_stats=True,
        speculative_config=None,
        progress=False,
        threads=options.threads,
    )
    engine = llm.llm_engine
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for number in range(options.answers):
        engine.add_request(f"answer {number}", [number + 1] * 32, endless)
    gaps = [_step(engine) for _ in range(_LEAD)][1:]
    prompt = [(7 * i) % 1000 + 1 for i in range(options.prompt_len)]
    engine.add_request("long", prompt, SamplingParams(temperature=0, max_tokens=1))
    began = time.perf_counter()
    first = 0.0
    while not first:
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        gaps.append(1e3 * (now - before))
        assert sum(o.request_id.startswith("answer") for o in outputs) == options.answers
        if any(o.request_id == "long" for o in outputs):
            first = 1e3 * (now - began)
    gaps += [_step(engine) for _ in range(_LEAD)]
    engine.abort_request([f"answer {number}" for number in range(options.answers)])
    return gaps, first


def _step(engine) -> float:  # type: ignore[no-untyped-def]
    before = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - before)


if __name__ == "__main__":
    main()
