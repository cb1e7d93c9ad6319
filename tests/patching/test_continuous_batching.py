"""transformers' continuous batching on a patched model: its modules run on int32 ids."""

from __future__ import annotations

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import torch_armllm
from tests.support.models import tiny, token_ids

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]


@pytest.mark.filterwarnings("ignore:torch_armllm. the fast path does not know")
@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=str)
def test_generate_batch_equals_generate(tied: bool, dtype: torch.dtype) -> None:
    model = tiny("llama", dtype, tie_word_embeddings=tied)
    torch_armllm.patch(model, progress=False)
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=96, pad_token_id=0)
    expected = [
        model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :].tolist()
        for ids in PROMPTS
    ]
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    )
    assert [output.error for output in outputs.values()] == [None, None]
    assert [output.generated_tokens for output in outputs.values()] == expected


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_int32_ids_and_positions_equal_int64(family: str) -> None:
    model = tiny(family, torch.bfloat16, tie_word_embeddings=True)
    torch_armllm.patch(model, progress=False)
    ids, positions = token_ids(2, 12), torch.arange(12)[None]
    expected = model(ids, position_ids=positions).logits
    assert torch.equal(model(ids.int(), position_ids=positions).logits, expected)
    assert torch.equal(model(ids, position_ids=positions.int()).logits, expected)
