"""LoRA adapters of models that several processes compute together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import ALL, random_adapter
from tests.support.models import tiny
from tests.support.rank_processes import ended, pids
from torch_armllm import LLM, LoRARequest, SamplingParams
from torch_armllm.engine.errors import RankFailedError
from torch_armllm.engine.execution.rank_leader import RankLeader

pytestmark = pytest.mark.usefixtures("warm_processes")
PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60)), [5, 6, 7] * 9 + [9]]
SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
KINDS: list[dict[str, Any]] = [
    {"target_modules": [*ALL, "lm_head", "embed_tokens"]},
    {"target_modules": ALL[:3], "r": 5},
    {"target_modules": ALL[3:], "r": 3},
]
RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float model, three adapters of it, and one of another model."""
    path = tmp_path_factory.mktemp("model")
    model = tiny("llama", torch.bfloat16, **SIZES)
    for number, kind in enumerate(KINDS):
        random_adapter(model, path / str(number), number + 1, 1.0, **kind)
    model.save_pretrained(path / "base")
    random_adapter(tiny("llama", torch.bfloat16, **{**SIZES, "intermediate_size": 352}), path / "other", 4)
    return path


def load(folder: Path, **settings: Any) -> LLM:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "threads": 1, "max_loras": 2}
    options |= {"kv_cache_memory": 1 << 20, "speculative_config": None, "tensor_parallel_size": 1}
    return LLM(str(folder / "base"), enable_lora=True, **{**options, **settings})


def request(folder: Path, number: int | str) -> LoRARequest:
    return LoRARequest(
        f"adapter-{number}", 9 if number == "other" else int(number) + 1, str(folder / str(number))
    )


def run(llm: LLM, adapters: list[LoRARequest | None]) -> list[Any]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=3, logprobs=2)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
    return [(list(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs]


def batches(folder: Path) -> Iterator[list[LoRARequest | None]]:
    first, second, third = (request(folder, number) for number in range(3))
    yield [first, None, second, first]
    yield [None] * 4
    yield [third, second, None, second]  # takes the slot of the first one


def check_same(folder: Path, several: LLM) -> None:
    """Compares several processes with one, whose adapters come and go, and lets a wrong one be refused."""
    one, results = load(folder), []
    for adapters in batches(folder):
        results.append(run(one, adapters))
        assert run(several, adapters) == results[-1]
    assert results[0][1] == results[1][1] and results[0][0] != results[1][0]
    with pytest.raises(ValueError, match="it is an adapter of another model"):
        run(several, [request(folder, "other"), None, None, None])
    several.llm_engine.remove_lora(3)
    assert [each.lora_int_id for each in several.llm_engine.list_loras()] == [2]
    assert run(several, next(batches(folder))) == results[0]


@pytest.mark.slow
def test_adapters_have_the_bits_of_one_process_and_a_rank_killed_while_one_is_loaded_ends_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(pids())
    llm = load(folder, **RANKS)
    (process,) = set(pids()) - before
    check_same(folder, llm)
    post = RankLeader._post
    messages: list[Any] = []

    def killing(leader: RankLeader, *message: Any) -> None:
        messages.append(message)
        if len(messages) == 5:
            os.kill(process, signal.SIGKILL)
        post(leader, *message)

    monkeypatch.setattr(RankLeader, "_post", killing)
    with pytest.raises(RankFailedError, match=f"rank 1 has failed: process {process} was ended by signal 9"):
        run(llm, [request(folder, 2), None, None, None])
    assert ended(process)


@pytest.mark.slow
@pytest.mark.thorough
def test_adapters_of_stages_of_two_ranks_have_the_bits_of_one_process(folder: Path) -> None:
    check_same(folder, load(folder, max_num_batched_tokens=16, max_num_seqs=8, **RANKS, **STAGES))


@pytest.mark.thorough
@pytest.mark.slow
def test_stages_adapt_experts_and_ranks_refuse_to(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 64}
    model = tiny("qwen3_moe", torch.bfloat16, **sizes)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    random_adapter(model, tmp_path / "0", 1, 1.0, target_modules=["q_proj"], target_parameters=parameters)
    random_adapter(model, tmp_path / "1", 2, 1.0, target_modules=ALL[:4])
    model.save_pretrained(tmp_path / "base")
    both = [request(tmp_path, number) for number in (0, 1)]
    one = load(tmp_path)
    assert run(load(tmp_path, **STAGES), [*both, None, both[0]]) == run(one, [*both, None, both[0]])
    ranks = load(tmp_path, **RANKS)
    with pytest.raises(ValueError, match="share out experts without adapters; set tensor_parallel_size=1"):
        ranks.llm_engine.add_lora(both[0])
    assert run(ranks, [both[1], None, None, both[1]]) == run(one, [both[1], None, None, both[1]])
