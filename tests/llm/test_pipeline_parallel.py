"""Models whose layers several processes compute one after another."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny
from tests.support.rank_processes import ended, pids
from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.errors import RankFailedError
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.model_survey.tiny_models import tiny_model

PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60)), [5, 6, 7] * 9 + [9]]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama", torch.bfloat16, num_hidden_layers=5).save_pretrained(path)
    return path


def load(folder: Path, stages: int, **settings: Any) -> LLM:
    given = {"pipeline_parallel_size": stages, "speculative_config": None, "kv_cache_memory": 1 << 20}
    return LLM(str(folder), **{**given, **OPTIONS, **settings})


def run(llm: LLM, **settings: Any) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **settings)
    return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.mark.slow
def test_three_stages_return_the_tokens_and_logprobs_of_one_process(folder: Path) -> None:
    one = load(folder, 1, max_num_batched_tokens=16, max_num_seqs=8)
    before = set(pids())
    three = load(folder, 3, max_num_batched_tokens=16, max_num_seqs=8)
    processes = set(pids()) - before
    assert len(processes) == 2
    for settings in (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3, "logprobs": 2, "n": 2},
        {"temperature": 0, "prompt_logprobs": 1},
    ):
        for expected, found in zip(run(one, **settings), run(three, **settings), strict=True):
            assert found.prompt_logprobs == expected.prompt_logprobs
            for each, other in zip(found.outputs, expected.outputs, strict=True):
                assert each.token_ids == other.token_ids and each.logprobs == other.logprobs
    del three
    gc.collect()
    assert all(map(ended, processes))
