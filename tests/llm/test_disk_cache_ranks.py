"""The prefix cache on disk, and sessions, where several processes share a model out."""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.exact_outputs import prompt
from tests.support.models import tiny
from tests.support.rank_processes import ended, pids
from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.errors import RankFailedError
from torch_armllm.kv_cache.disk.disk_cache import DiskPrefixCache
from torch_armllm.model_survey.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("warm_processes")
CHAT = prompt(150, 1)
LONGER = [*CHAT, 5, 6]
FULL = 128
"""Tokens of the blocks that a request for `CHAT` may find."""
SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64, "num_hidden_layers": 3}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "threads": 1}
RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


def saved_model(folder: Path, family: str) -> Path:
    model = tiny("llama", torch.bfloat16, **SIZES) if family == "llama" else tiny_model(family)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> LLM:
    one = {"tensor_parallel_size": 1, "max_num_seqs": 4, "kv_cache_memory": 4 << 20}
    return LLM(str(folder), **{**one, **OPTIONS, **settings})


def run(llm: LLM, ids: list[int]) -> Any:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def disk_of(llm: LLM) -> DiskPrefixCache:
    disk = llm.llm_engine.disk
    assert disk is not None
    return disk


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", RANKS), pytest.param("qwen3_5_text", STAGES, marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_restart_finds_the_blocks_and_states_of_all_processes(
    tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    folder, cache = saved_model(tmp_path / "model", family), tmp_path / "cache"
    first = load(folder, prefix_cache_dir=cache, **sizes)
    expected = run(first, CHAT)
    first.save_session(tmp_path / "session", CHAT)
    later = run(first, LONGER)
    del first  # its end writes what is left
    gc.collect()
    second = load(folder, prefix_cache_dir=cache, **sizes)
    assert second.load_session(tmp_path / "session") == CHAT
    assert run(second, LONGER) == later
    assert disk_of(second).counts().hits == 0, "the session has been found in memory"
    second.reset_prefix_cache()
    assert run(second, CHAT) == expected and run(second, LONGER) == later
    assert disk_of(second).counts().hits == FULL


@pytest.mark.slow
def test_a_killed_rank_ends_the_engine_and_files_of_ranks_are_not_those_of_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, cache = saved_model(tmp_path / "model", "llama"), tmp_path / "cache"
    before = set(pids())
    llm = load(folder, prefix_cache_dir=cache, **RANKS)
    expected = run(llm, CHAT)
    (process,) = set(pids()) - before
    os.kill(process, signal.SIGTERM)  # as systemd does; the leader still writes what it has
    llm.save_session(tmp_path / "session", CHAT)
    assert disk_of(llm).flush()
    llm.reset_prefix_cache()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RankFailedError, match=f"rank 1 has failed: process {process} was ended by signal 9"):
        run(llm, CHAT)
    assert ended(process)
    caplog.set_level(logging.INFO)
    alone = load(folder, prefix_cache_dir=cache)
    assert "is of this model with these settings, ranks" in caplog.text
    with pytest.raises(ValueError, match="a session of another model, dtype of the cache, kind of CPU, num"):
        alone.load_session(tmp_path / "session")
    assert run(alone, CHAT) == expected and disk_of(alone).counts().hits == 0
