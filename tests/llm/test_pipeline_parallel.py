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
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.llm.ranks.processes import RankProcesses
from torch_armllm.model_survey.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("warm_processes")
PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60)), [5, 6, 7] * 9 + [9]]
SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64, "num_hidden_layers": 3}
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


def answers(llm: LLM, **settings: Any) -> list[Any]:
    """Returns the tokens and logprobs of each prompt, and of its sequences."""
    found = run(llm, **settings)
    return [(o.prompt_logprobs, [(each.token_ids, each.logprobs) for each in o.outputs]) for o in found]


def run_often(llm: LLM) -> None:
    for _ in range(1000):
        run(llm, temperature=0)


@pytest.mark.slow
@pytest.mark.thorough
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
        assert answers(three, **settings) == answers(one, **settings)
    del three
    gc.collect()
    assert all(map(ended, processes))


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.thorough), "qwen3_5_text"])
def test_stages_of_two_ranks_return_the_tokens_and_logprobs_of_one_process(
    tmp_path: Path, family: str
) -> None:
    model = tiny("llama", torch.bfloat16, **SIZES) if family == "llama" else tiny_model(family)
    model.save_pretrained(tmp_path)
    one = load(tmp_path, 1, max_num_batched_tokens=16, max_num_seqs=8)
    before = set(pids())
    four = load(tmp_path, 2, tensor_parallel_size=2, max_num_batched_tokens=16, max_num_seqs=8)
    processes = set(pids()) - before
    assert len(processes) == 3
    runner = four.llm_engine.runner
    assert runner.stages == 2 and "gather_columns" in getattr(runner.plan, "opcodes", ())
    for settings in ({"temperature": 0}, {"temperature": 0.9, "seed": 3, "logprobs": 2, "n": 2}):
        assert answers(four, **settings) == answers(one, **settings)
    del four, runner
    gc.collect()
    assert all(map(ended, processes))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_killed_rank_of_a_stage_ends_the_engine_with_its_name(tmp_path: Path) -> None:
    tiny("llama", torch.bfloat16, **SIZES).save_pretrained(tmp_path)
    before = set(pids())
    llm = load(tmp_path, 2, tensor_parallel_size=2)
    processes = sorted(set(pids()) - before)
    last = processes[-1]
    killer = threading.Timer(1.0, os.kill, [last, signal.SIGKILL])
    killer.start()
    with pytest.raises(RankFailedError, match=f"has failed: process {last} was ended by signal 9"):
        run_often(llm)
    killer.join()
    assert all(map(ended, processes))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("jamba", marks=pytest.mark.thorough)])
def test_stages_with_and_without_states_swap_preempted_sequences(tmp_path: Path, family: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "kv_cache_memory": None}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    tokens, preemptions = [], []
    for stages in (1, 2):
        llm = load(tmp_path, stages, **settings, swap_space=1 << 20)
        llm.llm_engine.scheduler.blocks._free[4:] = []  # so few that sequences are preempted
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        preemptions.append(llm.llm_engine.scheduler.preemptions)
        del llm
        gc.collect()
    assert tokens[0] == tokens[1]
    assert all(preemptions), preemptions


@pytest.mark.slow
def test_steps_under_way_end_before_a_request_is_aborted(folder: Path) -> None:
    expected = [output.outputs[0].token_ids for output in run(load(folder, 1), temperature=0)]
    llm = load(folder, 2)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(NewRequest(str(number), {"prompt_token_ids": prompt}, params))
    outputs: dict[str, RequestOutput] = {}
    steps = most = 0
    while engine.has_unfinished_requests():
        changed = engine.step()
        steps += 1
        most = max(most, len(engine._under_way))
        if steps == 12:
            changed += engine.abort_request("1")
        outputs |= {output.request_id: output for output in changed}
    assert most == 1, "one step begins while the other is under way"
    assert outputs["1"].outputs[0].finish_reason == "abort" and len(outputs["1"].outputs[0].token_ids) < 24
    for name in "023":
        assert outputs[name].outputs[0].token_ids == expected[int(name)]
    assert engine.scheduler.blocks.free == engine.scheduler.blocks.num_blocks


@pytest.mark.slow
def test_a_killed_stage_ends_the_engine_with_its_reason(folder: Path) -> None:
    before = set(pids())
    llm = load(folder, 3)
    processes = sorted(set(pids()) - before)
    killer = threading.Timer(1.0, os.kill, [processes[0], signal.SIGKILL])
    killer.start()
    with pytest.raises(RankFailedError, match=f"has failed: process {processes[0]} was ended by signal 9"):
        run_often(llm)
    killer.join()
    assert all(map(ended, processes))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_stage_that_does_not_answer_is_killed_and_ends_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankProcesses, "seconds_to_answer", 4)
    before = set(pids())
    llm = load(folder, 2)
    (process,) = set(pids()) - before
    run(llm, temperature=0)
    time.sleep(4.5)
    run(llm, temperature=0)  # stages that have nothing to do are well
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(RankFailedError, match=f"process {process} has not answered for 4 s"):
        run_often(llm)
    assert ended(process)
