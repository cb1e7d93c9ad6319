"""Models whose experts stay on disk: the same tokens within a fixed memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_armllm
from tests.llm.test_llm import tokenizer
from tests.support.models import tiny
from torch_armllm import LLM, Recipe, SamplingParams
from torch_armllm.ops.moe.expert_store import ExpertCounts, ExpertStore
from torch_armllm.plan.native import NativePlan

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 6, 7], list(range(3, 90)), [9] * 40, [3]]
KV = 4 << 20
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gpt_oss": {"num_local_experts": 16, "intermediate_size": 128},
    "qwen3_5_moe_text": {"num_experts": 16, "moe_intermediate_size": 128},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 128},
}


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARMLLM_PLAN_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def saved(family: str, place: Path, **sizes: Any) -> Path:
    layers = {} if family in ("gpt_oss", "qwen3_5_moe_text") else {"num_hidden_layers": 4}
    model = tiny(family, torch.bfloat16, **{"hidden_size": 256, **layers, **SIZES[family], **sizes})
    torch_armllm.quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"progress": False, "kv_cache_memory": KV, **settings})


def results(llm: LLM, prompts: Any = PROMPTS) -> list[Any]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def store(llm: LLM) -> ExpertStore | None:
    plan = llm.llm_engine.runner.plan  # type: ignore[attr-defined]
    assert isinstance(plan, NativePlan)
    return plan.experts


def counts(llm: LLM) -> ExpertCounts:
    experts = store(llm)
    assert experts is not None
    return experts.counts()


def split(folder: Path) -> tuple[int, int, int]:
    """Returns the bytes of weights that stay in memory, of experts in memory, and of the largest layer."""
    from torch_armllm.llm.plan_cache import entry
    from torch_armllm.llm.plan_cache.constants import total_bytes
    from torch_armllm.llm.plan_cache.disk_experts import disk_experts
    from torch_armllm.llm.plan_cache.key import plan_key

    key = plan_key(str(folder), {"dtype": "'auto'", "quantization": "'int4'", "kv": "auto"})
    assert key is not None
    found = entry.read(key)
    assert found is not None
    metadata, values = found
    on_disk = disk_experts(metadata["program"]["integers"], metadata["constants"], folder)
    assert on_disk is not None
    total = total_bytes(metadata["constants"], values, folder)
    return total - on_disk.nbytes, sum(on_disk.layer_bytes()), max(on_disk.layer_bytes())


@pytest.mark.parametrize("family", SIZES)
def test_experts_on_disk_give_the_same_bits(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model")
    whole = load(folder)
    assert store(whole) is None
    expected = results(whole)
    fixed, experts, layer = split(folder)
    for budget in (layer, (layer + experts) // 2):
        llm = load(folder, max_memory=KV + fixed + budget)
        assert results(llm) == expected
        assert [results(llm, [prompt])[0] for prompt in PROMPTS] == expected
        found = counts(llm)
        assert found.misses > len(PROMPTS) and found.bytes_read > experts - budget
        assert 0 < found.resident <= found.budget == budget < experts
