"""Leak check: blocks, requests and memory of an engine before and after many short requests.

    python -m bench.engine_churn [--model smollm2] [--requests 10000] [--preemption recompute]

Runs a tenth of the requests as a warm-up, so that caches and buffers reach their size, then all.  Prompts
have 1 to 24 tokens, and half of them share a prefix.  Outputs have 1 to 12 tokens, one in ten 60 to 100.
One request in eight asks for two outputs.  Requests are greedy or sampled, have three priorities, and share
a KV cache that is too small for all of them.  Every tenth request is aborted at a random step.  Prints JSON
lines: ``before`` and ``after`` with everything held (blocks, swap blocks, requests, resident bytes), and
the counts in between.  ``--model tiny`` is a random model of two layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from random import Random
from typing import Any

import torch_armllm
from bench.patch_memory import memory
from torch_armllm.checkpoint.load import load_model, load_tokenizer
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.patching.state import patched_forward
from torch_armllm.system.allocator import release_free_memory

MAX_MODEL_LEN = 128


def tiny_model() -> Any:
    """A random model of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


class Churn:
    """Random requests to an engine.

    Attributes:
        counts: steps, finished and aborted requests, and generated tokens.
    """

    def __init__(self, engine: LLMEngine, vocabulary: int, seed: int) -> None:
        self.engine = engine
        self.random = Random(seed)
        self.vocabulary = vocabulary
        self.beginning = self._tokens(16)
        self.counts = dict.fromkeys(("steps", "finished", "aborted", "tokens"), 0)
        self.names = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(count)]

    def _add(self) -> str:
        random = self.random
        prompt = self.beginning[: random.choice([0, 0, 8, 16])] + self._tokens(random.randint(1, 8))
        temperature = random.choice([0.0, 0.8])
        n = 2 if temperature and random.random() < 0.25 else 1
        max_tokens = random.randint(60, 100) if random.random() < 0.1 else random.randint(1, 12)
        params = SamplingParams(
            n=n, temperature=temperature, max_tokens=max_tokens, ignore_eos=random.random() < 0.9
        )
        name = str(self.names)
        self.names += 1
        self.engine.add_request(name, prompt, params, priority=random.randrange(3))
        return name

    def run(self, requests: int, at_once: int = 48) -> None:
        """Run ``requests`` requests, ``at_once`` of them at a time."""
        random, counts = self.random, self.counts
        running: set[str] = set()
        doomed: list[tuple[int, str]] = []
        left = requests
        while left or running:
            while left and len(running) < at_once:
                name = self._add()
                running.add(name)
                left -= 1
                if random.random() < 0.1:
                    doomed.append((counts["steps"] + random.randint(0, 8), name))
            for when, name in [d for d in doomed if d[0] <= counts["steps"]]:
                doomed.remove((when, name))
                running.discard(name)
                counts["aborted"] += len(self.engine.abort_request(name))
            for output in self.engine.step():
                if output.finished:
                    running.remove(output.request_id)
                    counts["finished"] += 1
                    counts["tokens"] += sum(len(sequence.token_ids) for sequence in output.outputs)
            counts["steps"] += 1


def build(name: str, blocks: int, swap: bool) -> LLMEngine:
    """Build an engine with ``blocks`` KV blocks."""
    tiny = name == "tiny"
    model, tokenizer = (tiny_model(), None) if tiny else (load_model(name), load_tokenizer(name))
    torch_armllm.patch(model, "int4", progress=False)
    forward = patched_forward(model)
    assert forward is not None, "the model runs module by module"
    size = blocks * forward.shape.block_size * forward.shape.bytes_per_token
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        kv_cache_memory=size,
        swap_space=size if swap else 0,
        disable_log_stats=True,
        speculative_config=None,
    )
    return build_engine(model, tokenizer, config)


def held_resources(engine: LLMEngine) -> dict[str, int]:
    """Return everything that an idle engine holds."""
    gc.collect()
    release_free_memory()
    blocks = engine.scheduler.blocks
    return {
        "blocks": blocks.num_blocks - blocks.free,
        "swap_blocks": blocks.swap_blocks - blocks.swap.free,
        "unfinished": engine.scheduler.running + engine.scheduler.waiting + engine.scheduler.swapped,
        "requests_and_sequences": sum(type(o) in (Request, Sequence) for o in gc.get_objects()),
        "resident_bytes": memory("VmRSS"),
    }


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--preemption", choices=("recompute", "swap"), default="recompute")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    engine = build(options.model, options.blocks, options.preemption == "swap")
    churn = Churn(engine, engine.sampler.vocab_size, options.seed)
    churn.run(options.requests // 10)
    print(json.dumps({"before": held_resources(engine)}), flush=True)
    warm, began = dict(churn.counts), time.perf_counter()
    churn.run(options.requests)
    seconds = time.perf_counter() - began
    counts = {name: count - warm[name] for name, count in churn.counts.items()}
    print(json.dumps({**counts, "preemptions": engine.scheduler.preemptions, "seconds": round(seconds, 1)}))
    print(json.dumps({"after": held_resources(engine)}))


if __name__ == "__main__":
    main()
