"""Decoding with experts on disk, at several sizes of the cache in memory.

    python -m bench.expert_cache [--model moe] [--shares 1,0.6,0.3] [--tokens 64]
        [--cache build/bench/models] [--threads N]

Prints a line for each share of the experts that memory holds: tokens per second of one sequence after
``--tokens`` tokens that fill the cache, hit rate, megabytes read per second, and the part of the time that
steps waited.  The model is random, and the hit rate is that of its routers: another model has another one.
A share of 1 has all weights in memory, without a store.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path

from bench.peers.engine_ours import quantized
from bench.peers.shapes import SHAPES
from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.stats import EngineStats
from torch_armllm.quant.recipe import Recipe

KV = 64 << 20


def measure(folder: Path, max_memory: int | None, tokens: int, threads: int | None) -> dict[str, float]:
    """Returns the rates of one model."""
    llm = LLM(
        *(str(folder),),
        skip_tokenizer_init=True,
        progress=False,
        kv_cache_memory=KV,
        max_memory=max_memory,
        threads=threads,
        speculative_config=None,
    )
    stats: EngineStats = llm.llm_engine.stats
    first, second = (
        SamplingParams(temperature=1, seed=seed, max_tokens=tokens, ignore_eos=True) for seed in (0, 1)
    )
    llm.generate([[1, 2, 3]], first, use_tqdm=False)
    before, began = stats.experts and stats.experts(), time.perf_counter()
    llm.generate([[4, 5, 6]], second, use_tqdm=False)
    seconds = time.perf_counter() - began
    found = {"tokens/s": tokens / seconds}
    if before is not None and stats.experts is not None:
        after = stats.experts()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        found |= {
            "hit rate": hits / (hits + misses),
            "MB/s": (after.bytes_read - before.bytes_read) / seconds / 1e6,
            "waited": (after.waited - before.waited) / 1e9 / seconds,
            "GB in memory": after.resident / 1e9,
        }
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measures all shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="moe")
    parser.add_argument("--shares", default="1,0.6,0.3")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cache", type=Path, default=Path("build/bench/models"))
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    os.environ["ARMLLM_PLAN_CACHE"] = "1"
    shape = SHAPES[options.model]
    folder = quantized(shape, options.cache, Recipe())
    sizes = {path: path.stat().st_size for path in folder.glob("*.safetensors")}
    experts = expert_bytes(folder)
    for share in map(float, options.shares.split(",")):
        fixed = sum(sizes.values()) - experts
        most = None if share == 1 else int(KV + fixed + share * experts)
        print(
            json.dumps({"share": share, **measure(folder, most, options.tokens, options.threads)}), flush=True
        )
        gc.collect()


def expert_bytes(folder: Path) -> int:
    """Returns the bytes of the experts in a folder."""
    from torch_armllm.llm.plan_cache.tensor_files import tensor_locations

    return sum(place.nbytes for name, place in tensor_locations(folder).items() if ".experts." in name)


if __name__ == "__main__":
    main()
