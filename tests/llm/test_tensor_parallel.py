"""Models that several processes compute together."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny
from tests.support.rank_processes import ended, pids
from torch_armllm import LLM, SamplingParams
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.errors import RankFailedError
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.llm.ranks.processes import RankProcesses
from torch_armllm.parallel.rank_place import RankPlace

pytestmark = pytest.mark.usefixtures("warm_processes")
PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60)), [5, 6, 7] * 9 + [9]]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "threads": 1}
SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama", torch.bfloat16, **SIZES).save_pretrained(path)
    return path


def load(folder: Path, ranks: int, **settings: Any) -> LLM:
    return LLM(str(folder), tensor_parallel_size=ranks, kv_cache_memory=1 << 20, **{**OPTIONS, **settings})


def run(llm: LLM, **settings: Any) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **settings)
    return llm.generate(PROMPTS, params, use_tqdm=False)


def answers(llm: LLM, **settings: Any) -> list[Any]:
    """Returns the tokens and logprobs of each prompt, and of its sequences."""
    found = run(llm, **settings)
    return [(o.prompt_logprobs, [(each.token_ids, each.logprobs) for each in o.outputs]) for o in found]


@pytest.mark.slow
def test_two_ranks_return_the_tokens_and_logprobs_of_one_and_end_with_the_engine(
    folder: Path, cold_processes: None
) -> None:
    one = load(folder, 1)
    before = set(pids())
    two = load(folder, 2)
    (process,) = set(pids()) - before
    two.sleep()  # on both ranks
    two.wake_up()
    for settings in ({"temperature": 0}, {"temperature": 0.9, "seed": 3, "logprobs": 2}, {"temperature": 0}):
        assert answers(two, **settings) == answers(one, **settings)
    del two
    gc.collect()
    assert ended(process)


@pytest.mark.slow
def test_ranks_with_whole_experts_return_the_tokens_of_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_experts": 5, "moe_intermediate_size": 48}
    tiny("qwen3_moe", torch.bfloat16, **sizes).save_pretrained(tmp_path)
    one, several = (load(tmp_path, ranks, enable_expert_parallel=True) for ranks in (1, 3))
    drawn = {"temperature": 0.9, "seed": 3, "logprobs": 2}
    assert answers(several, **drawn) == answers(one, **drawn)


@pytest.mark.slow
def test_a_model_without_experts_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="for models with quantized experts, and LlamaForCausalLM has none"):
        load(folder, 2, enable_expert_parallel=True)


def _run_often(llm: LLM) -> None:
    for _ in range(100):
        run(llm, temperature=0)


@pytest.mark.slow
def test_a_killed_rank_ends_the_engine_with_its_reason(folder: Path) -> None:
    before = set(pids())
    llm = load(folder, 2)
    (process,) = set(pids()) - before
    run(llm, temperature=0)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RankFailedError, match=f"rank 1 has failed: process {process} was ended by signal 9"):
        _run_often(llm)
    assert ended(process)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_killed_and_ends_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankProcesses, "seconds_to_answer", 4)
    before = set(pids())
    llm = load(folder, 3)
    run(llm, temperature=0)
    _, process = sorted(set(pids()) - before)
    time.sleep(4.5)
    run(llm, temperature=0)  # ranks that have nothing to do are well
    os.kill(process, signal.SIGSTOP)
    message = f"rank 2 has failed: process {process} has not answered for 4 s"
    with pytest.raises(RankFailedError, match=message):
        run(llm, temperature=0)
    assert ended(process)


@pytest.mark.slow
def test_a_rank_tells_its_stack(folder: Path) -> None:
    load = ModelRequest(str(folder), quantization=None), EngineConfig(threads=1, pin_threads=False)
    cpus = sorted(os.sched_getaffinity(0))
    processes = RankProcesses([cpus, cpus], RankPlace(0, 2, 1), load)
    try:
        processes.gather(None)
        assert "rank_process.py" in processes.stack_of(1)
    finally:
        processes.close()
