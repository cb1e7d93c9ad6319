"""vLLM on the CPU, in this process, with random weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.peers.setup import Setup
from bench.peers.shapes import CONTEXT
from bench.peers.work import Work

MAX_MODEL_LEN = 4608
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
}


class Vllm:
    """See `work.Engine`."""

    def __init__(self, folder: Path) -> None:
        from vllm import EngineArgs, LLMEngine

        assert MAX_MODEL_LEN <= CONTEXT
        self.engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=16,
                disable_log_stats=True,
            )
        )

    def ways(self, work: Work) -> list[str]:
        return ["compiled"]

    def prepare(self, work: Work, way: str) -> None:
        pass

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[str, list[int]]:
        outputs = {output.request_id: list(output.outputs[0].token_ids) for output in self.engine.step()}
        return {name: tokens for name, tokens in outputs.items() if tokens}

    def stop(self, name: str) -> None:
        self.engine.abort_request([name])


def load(setup: Setup) -> Vllm:
    """Load the engine."""
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    folder = setup.cache / setup.shape.name / setup.engine
    folder.mkdir(parents=True, exist_ok=True)
    quantized = {"quantization_config": INT4} if setup.engine == "vllm-int4" else {}
    (folder / "config.json").write_text(json.dumps({**setup.shape.config, **quantized}))
    return Vllm(folder)
