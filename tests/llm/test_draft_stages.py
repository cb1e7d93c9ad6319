"""Draft tokens that a pipeline verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny
from torch_armllm import LLM, SamplingParams
from torch_armllm.model_survey.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("warm_processes")
PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60)), [5, 6, 7] * 9 + [9], [8, 9] * 20]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "threads": 1}


def load(folder: Path, stages: int, drafts: dict[str, Any] | None = None, **settings: Any) -> LLM:
    given: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "max_model_len": 96,
        "kv_cache_memory": 4 << 20,
    }
    given |= {"pipeline_parallel_size": stages, "speculative_config": drafts}
    return LLM(str(folder), **{**given, **OPTIONS, **settings})


def run(llm: LLM, **settings: Any) -> list[Any]:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **settings)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    blocks = llm.llm_engine.scheduler.blocks
    assert blocks.free == blocks.num_blocks
    assert blocks.states is None or blocks.states.free == len(blocks.states)
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "draft_model"), pytest.param("qwen3_5_text", "ngram", marks=pytest.mark.thorough)],
)
def test_stages_that_verify_drafts_return_the_tokens_and_logprobs_without(
    tmp_path: Path, family: str, method: str
) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=3) if family == "llama" else tiny_model(family)
    model.save_pretrained(tmp_path)
    cases: tuple[dict[str, Any], ...] = (
        {"temperature": 0, "logprobs": 1},
        {"temperature": 0.5, "seed": 3, "logprobs": 2, "n": 2},
    )
    one = load(tmp_path, 1)
    expected = [run(one, **settings) for settings in cases]
    drafts = {"method": method, "num_speculative_tokens": 3}
    two = load(tmp_path, 2, drafts if method == "ngram" else {**drafts, "model": str(tmp_path)})
    assert [run(two, **settings) for settings in cases] == expected
    decoder = two.llm_engine.speculative_decoder
    assert decoder is not None and decoder.acceptance.accepted
    rejected = decoder.acceptance.drafted - decoder.acceptance.accepted
    assert (method == "draft_model") == (rejected == 0), "the model drafts what it says itself"
