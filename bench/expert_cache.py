"""Decoding with experts on disk, at several sizes of the cache in memory.

    python -m bench.expert_cache [--model moe] [--shares 1,0.6,0.3] [--tokens 64]
        [--cache build/bench/models] [--threads N]

A row for each share of the experts that memory holds has tokens per second of one sequence after ``--tokens``
tokens that fill the cache, hit rate, megabytes read per second, and the part of the time that steps waited.
The model is random, and the hit rate is that of its routers: another model has another one.  A share of 1 has
all weights in memory, without a store.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

from bench.case import Row, run
from bench.engine_steps import QUIET, timed
from bench.peers.engine_ours import quantized
from bench.peers.shapes import SHAPES
from torch_armllm import LLM, SamplingParams
from torch_armllm.llm.plan_cache.tensor_files import tensor_locations
from torch_armllm.quant.recipe import Recipe

KV = 64 << 20
_LOGGED = {**QUIET, "disable_log_stats": False}


def expert_cache(
    *,
    model: str = "moe",
    shares: tuple[float, ...] = (1.0, 0.6, 0.3),
    tokens: int = 64,
    cache: Path = Path("build/bench/models"),
    threads: int | None = None,
) -> Iterator[Row]:
    os.environ["ARMLLM_PLAN_CACHE"] = "1"
    folder = quantized(SHAPES[model], cache, Recipe())
    experts = sum(p.nbytes for name, p in tensor_locations(folder).items() if ".experts." in name)
    fixed = sum(path.stat().st_size for path in folder.glob("*.safetensors")) - experts
    for share in shares:
        most = None if share == 1 else int(KV + fixed + share * experts)
        llm = LLM(str(folder), kv_cache_memory=KV, max_memory=most, threads=threads, **_LOGGED)
        yield {"share": share, **_rates(llm, tokens)}
        del llm
        gc.collect()


def _rates(llm: LLM, tokens: int) -> Row:
    stats = llm.llm_engine.stats
    first, second = (
        SamplingParams(temperature=1, seed=seed, max_tokens=tokens, ignore_eos=True) for seed in (0, 1)
    )
    llm.generate([[1, 2, 3]], first, use_tqdm=False)
    before = stats.experts and stats.experts()
    seconds = timed(lambda: llm.generate([[4, 5, 6]], second, use_tqdm=False))
    if before is None or stats.experts is None:
        return {"tok_s": tokens / seconds}
    after = stats.experts()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return {
        "tok_s": tokens / seconds,
        "hit_rate": hits / (hits + misses),
        "mb_s": (after.bytes_read - before.bytes_read) / seconds / 1e6,
        "waited": (after.waited - before.waited) / 1e9 / seconds,
        "gb_in_memory": after.resident / 1e9,
    }


if __name__ == "__main__":
    run(expert_cache)
