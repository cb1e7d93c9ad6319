"""Models whose experts stay on disk: the same tokens within a fixed memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import torch_armllm
from tests.llm.test_llm import tokenizer
from tests.support.models import tiny
from tests.support.server_live import live, until
from torch_armllm import LLM, Recipe, SamplingParams
from torch_armllm.engine.reports.stats import EngineStats
from torch_armllm.engine.settings.memory_limit import MemoryLimitError
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.llm.loading import cached_loader
from torch_armllm.llm.plan_cache import entry, tensor_files
from torch_armllm.llm.plan_cache.constants import total_bytes
from torch_armllm.llm.plan_cache.disk_experts import disk_experts
from torch_armllm.llm.plan_cache.key import plan_key
from torch_armllm.plan.expert_store import ExpertCounts, ExpertStore
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import decode

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 6, 7], list(range(3, 90)), [9] * 40, [3]]
KV = 4 << 20
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gpt_oss": {"num_local_experts": 16, "intermediate_size": 128},
    "qwen3_5_moe_text": {
        "num_experts": 16,
        "moe_intermediate_size": 128,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "mixtral": {"num_local_experts": 8, "intermediate_size": 128},
}


@pytest.fixture(scope="module", autouse=True)
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMLLM_PLAN_CACHE", "1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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


class Stored(NamedTuple):
    """A model whose plan is stored: bytes of weights that stay, of its experts, and of the largest layer."""

    folder: Path
    fixed: int
    experts: int
    layer: int


def stored(folder: Path) -> Stored:
    """Describes a model that has been loaded before."""
    key = plan_key(str(folder), {"dtype": "'auto'", "quantization": "'int4'", "kv": "auto"})
    assert key is not None
    found = entry.read(key)
    assert found is not None
    metadata, values = found
    on_disk = disk_experts(decode([], **metadata["program"]), metadata["constants"], folder)
    assert on_disk is not None
    total = total_bytes(metadata["constants"], values, folder)
    return Stored(folder, total - on_disk.nbytes, sum(on_disk.layer_bytes()), max(on_disk.layer_bytes()))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = saved("qwen3_moe", tmp_path_factory.mktemp("moe"))
    load(folder)
    return stored(folder)


@pytest.mark.parametrize("family", SIZES)
def test_experts_on_disk_give_the_same_bits(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model")
    whole = load(folder)
    assert store(whole) is None
    expected = results(whole)
    _, fixed, experts, layer = stored(folder)
    for budget in (layer, (layer + experts) // 2):
        llm = load(folder, max_memory=KV + fixed + budget)
        assert results(llm) == expected
        assert [results(llm, [prompt])[0] for prompt in PROMPTS] == expected
        found = counts(llm)
        assert found.misses > len(PROMPTS) and found.bytes_read > experts - budget
        assert 0 < found.resident <= found.budget == budget < experts


def test_prompts_batches_and_drafts_within_the_budget(moe: Stored) -> None:
    folder, fixed, experts, layer = moe
    prompts = [[(7 * i + j) % 90 + 3 for j in range(5 + 3 * i)] for i in range(12)]
    expected = results(load(folder), prompts)
    for settings in ({}, {"max_num_seqs": 3}, {"speculative_config": None, "threads": 1}):
        llm = load(folder, max_memory=KV + fixed + layer + experts // 8, **settings)
        assert results(llm, prompts) == expected
        assert results(llm, prompts[::-1]) == expected[::-1]


def test_model_that_fits_stays_in_memory(moe: Stored) -> None:
    expected = results(load(moe.folder))
    llm = load(moe.folder, max_memory=1 << 30)
    assert store(llm) is None and results(llm) == expected


def test_first_start_needs_no_stored_plan(
    moe: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, fixed, _, layer = moe
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "small"))
    with pytest.raises(MemoryLimitError):
        load(folder, max_memory=KV + 1000)
    assert stored(folder) == moe
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level("INFO", "torch_armllm"):
        llm = load(folder, max_memory=KV + fixed + layer)
    assert "are kept in memory" in caplog.text
    assert not llm.has_model and counts(llm).budget == layer
    expected = results(llm)
    assert results(load(folder)) == expected


def test_too_small_budget_names_what_is_needed(moe: Stored) -> None:
    folder = moe.folder
    for settings in ({}, {"kv_cache_memory": None}, {"kv_cache_memory": 0.5}):
        with pytest.raises(MemoryLimitError, match="is too little .* at least") as caught:
            load(folder, max_memory=200_000, **settings)
        needed = int(str(caught.value).split("at least ")[1].split(" MB")[0]) * 1_000_000
        llm = load(folder, max_memory=needed, **settings)
        assert results(llm, PROMPTS[:1])
    with pytest.raises(MemoryLimitError, match="leaves nothing"):
        load(folder, max_memory=1 << 30, kv_cache_memory=1.0)
    for amount in (0, 1, -1, -0.5):
        with pytest.raises(ValueError, match="max_memory"):
            load(folder, max_memory=amount)
    with pytest.raises(MemoryLimitError, match="are free: ask for less"):
        load(folder, max_memory=1 << 50, kv_cache_memory=(1 << 50) - 2_000_000)


def test_weights_beyond_the_free_memory_stay_on_disk(
    moe: Stored, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, fixed, experts, layer = moe
    expected = results(load(folder))
    weights = tensor_files.weight_bytes(folder)
    free = int((KV + fixed + layer + experts // 3) / 0.9)
    monkeypatch.setattr(cached_loader, "weight_bytes", lambda _: free + weights)
    monkeypatch.setattr("torch_armllm.engine.settings.memory_limit.free_memory", lambda: free)
    llm = load(folder)
    assert store(llm) is not None
    assert "reads its experts from the disk" in caplog.text
    assert results(llm) == expected


def test_dense_models_beyond_the_free_memory_load_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama", torch.bfloat16)
    torch_armllm.quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(cached_loader, "weight_bytes", lambda _: 1 << 50)
    first = load(tmp_path / "model")
    again = load(tmp_path / "model")
    assert first.has_model and not again.has_model
    assert results(first) == results(again)
    assert "experts" not in caplog.text
    with pytest.raises(MemoryLimitError, match="is too little"):
        load(tmp_path / "model", max_memory=KV + 10_000)


def test_other_weights_are_not_limited(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(tiny("llama"), skip_tokenizer_init=True, progress=False, max_memory=8 << 20)
    assert llm.kv_bytes <= 1 << 20
    assert "max_memory limits the KV cache only" in caplog.text


def test_a_damaged_file_fails_the_step_only(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "model")
    expected = results(load(folder))
    _, fixed, _, layer = stored(folder)
    llm = load(folder, max_memory=KV + fixed + layer)
    assert results(llm) == expected
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    for _ in range(2):
        os.truncate(file, 4000)
        with pytest.raises(Exception, match=r"model.safetensors is shorter than it was"):
            results(llm)
        file.write_bytes(whole)
        assert results(llm) == expected
    file.unlink()  # it stays open
    assert results(llm) == expected
    assert counts(llm).resident <= layer


def test_loads_leave_nothing_behind(moe: Stored) -> None:
    folder, fixed, _, layer = moe
    gc.freeze()  # what earlier tests keep is not scanned again and again
    found = []
    for _ in range(7):
        llm = load(folder, max_memory=KV + fixed + layer)
        results(llm, PROMPTS[:1])
        del llm
        for _ in range(3):  # C++ objects lie between Python's: a collection frees what the next one finds
            gc.collect()
        found.append((len(os.listdir("/dev/fd")), threads(), maps()))
    assert found[3][0] == found[-1][0]
    until(lambda: threads() <= found[3][1])  # a thread is listed for a moment after it has been joined
    assert found[-1][2] <= found[3][2] + 2


def threads() -> int:
    """Returns the number of threads of the process."""
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if folder.exists() else 0


def maps() -> int:
    """Returns the number of mappings of the process."""
    file = Path("/proc/self/maps")
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_log_line_and_rates(moe: Stored) -> None:
    folder, fixed, _, layer = moe
    llm = load(folder, max_memory=KV + fixed + layer)
    stats: EngineStats = llm.llm_engine.stats
    before = counts(llm)
    results(llm)
    after = counts(llm)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    line = stats.line(2.0)
    assert f", Expert cache hit rate: {100 * hits / (hits + misses):.1f}%, read " in line
    assert "MB/s, waited " in line
    assert "Expert" not in load(folder).llm_engine.stats.line(1.0)
    assert llm.promised_bytes == KV + after.unfilled


def test_metrics_of_a_server(moe: Stored) -> None:
    folder, fixed, _, layer = moe
    llm = AsyncLLM(str(folder), progress=False, kv_cache_memory=KV, max_memory=KV + fixed + layer)
    with live(llm) as server:
        body = {"prompt": "abc", "max_tokens": 7, "ignore_eos": True}
        assert httpx.post(f"{server.base}/v1/completions", json=body).status_code == 200
        page = httpx.get(f"{server.base}/metrics").text
    numbers = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("armllm:expert_cache")
    }
    assert numbers["armllm:expert_cache_max_bytes"] == layer >= numbers["armllm:expert_cache_bytes"] > 0
    for name in ("hits", "misses", "read_bytes", "wait_seconds"):
        assert numbers[f"armllm:expert_cache_{name}_total"] > 0
