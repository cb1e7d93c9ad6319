"""Models with several replicas."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny
from tests.support.rank_processes import ended
from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.errors import ReplicaFailedError

pytestmark = pytest.mark.usefixtures("warm_processes")
OPTIONS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "progress": False, "threads": 1, "kv_cache_memory": 1 << 20},
}
PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60)), [5, 6, 7] * 9 + [9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    return path


@pytest.mark.slow
def test_two_replicas_return_the_tokens_and_logprobs_of_one_engine(
    folder: Path, cold_processes: None
) -> None:
    one, two = LLM(str(folder), **OPTIONS), LLM(str(folder), data_parallel_size=2, **OPTIONS)
    # requests without seeds draw theirs in the order of their submission, as in one engine
    for settings in ({"temperature": 0}, {"temperature": 0.9, "logprobs": 2, "n": 2, "prompt_logprobs": 1}):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **settings)
        expected, found = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (one, two))
        for left, right in zip(expected, found, strict=True):
            assert right.outputs == left.outputs
            assert right.prompt_logprobs == left.prompt_logprobs
            assert right.prompt_token_ids == left.prompt_token_ids
    assert two.reset_prefix_cache()
    two.sleep()
    two.wake_up()
    assert (two.vocab_size, two.max_model_len) == (one.vocab_size, one.max_model_len)
    assert two.max_num_seqs == 2 * one.max_num_seqs
    assert {metric.labels["engine"] for metric in two.get_metrics()} == {"0", "1"}
    with pytest.raises(ValueError, match="max_model_len is 512"):
        two.generate([[1] * 600], use_tqdm=False)
    with pytest.raises(ValueError, match="the model is in the processes of the replicas"):
        two.model  # noqa: B018

    assert two.replicas is not None
    processes = [replica.pid for replica in two.replicas.replicas]
    os.kill(processes[0], signal.SIGSTOP)  # it holds what it got
    stream = two.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    os.kill(processes[0], signal.SIGKILL)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises((ReplicaFailedError, RuntimeError), match="has ended: process"):
        list(stream)
    two.replicas.close()
    assert all(map(ended, processes))


@pytest.mark.slow
def test_a_replica_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="replica 0 failed: "):
        LLM(str(tmp_path), data_parallel_size=2, runner="generate", **OPTIONS)
