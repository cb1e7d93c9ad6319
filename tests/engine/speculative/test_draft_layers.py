"""Engines that draft by layers: outputs and bits stay as they are, in the memory that was given."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import torch_armllm
from tests.support.draft_engines import (
    EAGLE_LAYERS,
    MTP,
    SEVERAL,
    TIMES,
    accepted,
    drafter_of,
    loaded,
    sampled,
)
from tests.support.draft_folders import FAMILIES, eagle3_folder, mtp_folder
from tests.support.exact_outputs import check_preempted, exact_outputs, prompt, small_engine
from torch_armllm.checkpoint.load import load_model
from torch_armllm.engine.speculative.adaptive import AdaptiveDrafts
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan


@pytest.mark.parametrize(
    ("family", "temperature"),
    [*((family, 0.0) for family in (*FAMILIES, *SEVERAL, "eagle3")), ("qwen3_5_text", 0.8), ("eagle3", 0.8)],
)
def test_drafts_change_no_output(family: str, temperature: float, models: Any) -> None:
    model, settings = models(family)
    prompts = [prompt(length, length) for length in (1, 2, 31, 32, 33, 70)]
    prompts.append(prompts[-1][:64] + prompts[2])  # begins with cached blocks
    params = sampled(temperature=temperature)
    expected = exact_outputs(small_engine(model, speculative_config=None), prompts, params)
    engine = small_engine(model, speculative_config=settings)
    assert exact_outputs(engine, prompts, params) == expected
    assert exact_outputs(engine, prompts[::-1], params) == expected[::-1]  # all of it is cached
    drafted, _ = accepted(engine)
    assert drafted > 100


@pytest.mark.parametrize("family", ["qwen3_5_text", *SEVERAL[:1], "eagle3"])
def test_a_fused_head_drafts_the_same_tokens(family: str, models: Any) -> None:
    model, settings = models(family)
    prompts, params = [prompt(n, n) for n in (5, 40, 3)], sampled(temperature=0.0, logprobs=None)
    drafts: list[list[Any]] = []
    for fuses in (False, True):
        engine = small_engine(model, speculative_config=settings)
        proposer = drafter_of(engine)
        propose = proposer.propose
        for runner in proposer.runners:
            runner.may_fuse = fuses
        drafts.append([])

        def record(sequences: Any, counts: Any, propose: Any = propose) -> list[list[int]]:
            drafts[-1].append((list(counts), found := propose(sequences, counts)))
            return found

        proposer.propose = record  # type: ignore[method-assign]
        exact_outputs(engine, prompts, params)
        assert all((runner.fused_head is not None) == fuses for runner in proposer.runners)
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10


@pytest.mark.parametrize("family", [SEVERAL[0], "glm4_moe", "qwen3_5_text", "eagle3"])
def test_drafts_survive_preemption(family: str, models: Any) -> None:
    model, settings = models(family)
    forward = patched_forward(model)
    assert forward is not None
    runners = drafter_of(small_engine(model, speculative_config=settings)).runners
    shape, own = forward.shape, sum(runner.layer.shape.bytes_per_token for runner in runners)
    states = 12 * shape.states.bytes_per_sequence  # of three sequences, and before three draft tokens of each
    block = shape.block_size * (shape.bytes_per_token + own)
    spare = 3 * shape.block_size * own
    memory = spare + max(2 * states, states + 5 * block)
    make = functools.partial(small_engine, model, speculative_config=None)
    for engine in check_preempted(make, memory, speculative_config=settings):
        drafted, _ = accepted(engine)
        assert drafted > 30


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", "eagle3"])
def test_the_cache_of_a_layer_is_part_of_the_memory(
    family: str, models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, settings = models(family)
    memory, swap = 1 << 20, 1 << 19
    with caplog.at_level(logging.INFO, "torch_armllm.engine.assembly"):
        engine = small_engine(
            model, speculative_config=settings, kv_cache_memory=memory, swap_space=swap, max_num_seqs=4
        )
    decoder, runner = engine.speculative_decoder, engine.runner
    (drafter,) = drafter_of(engine).runners
    taken = sum(tensor.nbytes for tensor in drafter.cache if tensor is not None)
    assert decoder is not None and taken == decoder.kv_bytes > 0
    assert "; the drafter's own cache" in caplog.text
    assert 0.4 * memory < runner.kv_bytes + taken <= memory
    swapped = [drafter.swap, runner.executor.caches.swap, runner.executor.caches.swapped_states]  # type: ignore[attr-defined]
    assert 0.4 * swap < sum(t.nbytes for each in swapped for t in each if t is not None) <= swap


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", *SEVERAL[:1]])
def test_forked_sequences_draft(family: str, models: Any) -> None:
    model, settings = models(family)
    prompts, params = [prompt(n, n) for n in (5, 40)], sampled(n=3, temperature=1.0)
    expected = exact_outputs(small_engine(model, speculative_config=None), prompts, params)
    engine = small_engine(model, speculative_config=settings)
    assert exact_outputs(engine, prompts, params) == expected
    drafted, _ = accepted(engine)
    assert drafted > 100


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text", *SEVERAL[:1]])
def test_an_exact_layer_is_always_right(family: str, tmp_path: Path) -> None:
    name, _, drafting = family.partition(TIMES)
    mtp_folder(tmp_path, name, exact=True, drafting=int(drafting or 1))
    engine = small_engine(loaded(tmp_path, None), speculative_config=MTP)
    exact_outputs(engine, [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0))
    drafted, right = accepted(engine)
    assert drafted == right > 30


def test_an_exact_eagle3_draft_is_right_about_the_next_token(tmp_path: Path) -> None:
    """The model maps each token to another one, and the draft maps what three layers know of it twice."""
    model = tiny_model("llama", num_hidden_layers=EAGLE_LAYERS, hidden_size=128, head_dim=32)
    size, vocabulary = model.config.hidden_size, model.config.vocab_size
    follows = torch.eye(size)[torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0)), :]
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    model.model.embed_tokens.weight.data = torch.eye(vocabulary, size)
    model.lm_head.weight.data = follows.clone()
    model.save_pretrained(tmp_path / "model")
    tensors = eagle3_folder(tmp_path / "draft", model, draft_vocab_size=vocabulary)
    square = follows[:, :vocabulary] @ follows[:, :vocabulary]
    tensors |= {
        "fc.weight": torch.eye(size).repeat(1, 3),
        "lm_head.weight": F.pad(square, (0, size - vocabulary)),
        "d2t": torch.zeros(vocabulary, dtype=torch.int64),
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"].zero_()
    tensors["norm.weight"].fill_(1.0)
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    settings = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 1}
    engine = small_engine(loaded(tmp_path / "model", None), speculative_config=settings)
    exact_outputs(engine, [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0))
    drafted, right = accepted(engine)
    assert drafted == right > 20


def test_an_engine_after_one_with_an_eagle3_draft_has_the_plan_of_the_model(folders: Any) -> None:
    folder, _, settings = folders("eagle3")
    model = loaded(folder)
    forward = patched_forward(model)
    assert forward is not None
    plan, texts, params = (
        forward.plan,
        [prompt(n, n) for n in (5, 40)],
        sampled(temperature=0.0, logprobs=None),
    )
    assert isinstance(plan, NativePlan)
    weights = packed_addresses(plan)
    expected = exact_outputs(small_engine(model, speculative_config=None), texts, params)
    drafting = small_engine(model, speculative_config=settings)
    wider: Any = drafting.runner.plan  # type: ignore[attr-defined]
    assert forward.plan is plan is not wider and weights == packed_addresses(plan) == packed_addresses(wider)
    later = small_engine(model)
    assert later.speculative_decoder is not None
    assert isinstance(later.speculative_decoder.proposer, AdaptiveDrafts)
    for engine in (drafting, later, drafting):
        assert exact_outputs(engine, texts, params) == expected
        assert engine.runner.executor.layers.fused_head is not None  # type: ignore[attr-defined]


def packed_addresses(plan: NativePlan) -> set[int]:
    """Returns where the packed weights of a plan are."""
    return {t.data_ptr() for t in plan.program.constants if t.dtype == torch.uint8}


def test_rejection_sampling_accepts_more_than_it_rejects(tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe", exact=True)
    settings = {**MTP, "draft_sampling": "rejection"}
    engine = small_engine(loaded(tmp_path, None), speculative_config=settings)
    exact_outputs(engine, [prompt(n, n) for n in (5, 40)], sampled(temperature=1.0))
    drafted, right = accepted(engine)
    assert drafted > 30 and right > 0.9 * drafted


def test_layers_of_bfloat16_models_draft(tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe", dtype=torch.bfloat16)
    model = load_model(str(tmp_path), torch.bfloat16)
    torch_armllm.patch(model, progress=False)
    prompts, params = [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0)
    expected = exact_outputs(small_engine(model, speculative_config=None), prompts, params)
    assert exact_outputs(small_engine(model, speculative_config=MTP), prompts, params) == expected


def test_an_unused_layer_is_named_in_the_log(folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _, settings = folders("qwen3_5_text")
    options = {"skip_tokenizer_init": True, "progress": False, "kv_cache_memory": 1 << 20}
    with caplog.at_level(logging.INFO, "torch_armllm.llm.loading.loader"):
        torch_armllm.LLM(str(folder), **options)
        assert "carries a layer for multi-token prediction" in caplog.text
        caplog.clear()
        torch_armllm.LLM(str(folder), speculative_config=settings, **options)
    assert "multi-token" not in caplog.text
