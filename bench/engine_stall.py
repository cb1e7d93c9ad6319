"""Time between tokens of running sequences while a long prompt is prefilled.

    python -m bench.engine_stall [--model smollm2] [--prompt-len 8000] [--answers 4] [--ways paced]

A long prompt arrives while other sequences decode.  It is prefilled in chunks that fit into `max_step_time`
(``paced``), in equal chunks, or in one piece (``whole``).  A row for each has the median and the worst time
between two tokens of a running sequence, and the long prompt's TTFT, in ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Annotated

from bench.case import Row, run
from bench.engine_steps import QUIET, greedy, timed
from torch_armllm import LLM
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.text.preprocess import NewRequest

_LEAD = 20
"""Steps before the long prompt comes, and after its first token."""


def engine_stall(
    *,
    model: str = "smollm2",
    prompt_len: int = 8000,
    answers: int = 4,
    chunk: Annotated[int, "most tokens of a step"] = 512,
    max_step_time: float | None = EngineConfig.max_step_time,
    ways: tuple[str, ...] = ("paced", "chunks", "whole"),
    threads: int | None = None,
) -> Iterator[Row]:
    room = prompt_len + 64
    for way in ways:
        llm = LLM(
            model,
            quantization="int4",
            max_num_batched_tokens=room + answers if way == "whole" else chunk,
            max_model_len=room,
            max_step_time=max_step_time if way == "paced" else None,
            enable_chunked_prefill=way != "whole",
            threads=threads,
            **QUIET,
        )
        engine = llm.llm_engine
        for number in range(answers):
            engine.add_request(NewRequest(f"answer {number}", [number + 1] * 32, greedy(None)))
        gaps = [timed(engine.step) for _ in range(_LEAD)][1:]
        engine.add_request(
            NewRequest(
                "long", [(7 * i) % min(1000, llm.vocab_size - 1) + 1 for i in range(prompt_len)], greedy(1)
            )
        )
        began, first = time.perf_counter(), 0.0
        while not first:
            before = time.perf_counter()
            outputs = engine.step()
            gaps.append(time.perf_counter() - before)
            assert sum(o.request_id.startswith("answer") for o in outputs) == answers
            if any(o.request_id == "long" for o in outputs):
                first = time.perf_counter() - began
        gaps += [timed(engine.step) for _ in range(_LEAD)]
        engine.abort_request([f"answer {number}" for number in range(answers)])
        figures = {"between_tokens_ms": median(gaps), "at_worst_ms": max(gaps), "first_token_ms": first}
        yield {"way": way, **{name: 1e3 * seconds for name, seconds in figures.items()}}


if __name__ == "__main__":
    run(engine_stall)
