"""Embeddings of texts that are computed in several chunks, with the cache between them."""

from __future__ import annotations

import pytest
import torch

import torch_armllm
from tests.support.plan_steps import plan_steps
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.server.handlers.embeddings import _ChunkedPrefill


@pytest.mark.parametrize("family", ["llama", "mamba2"])
@torch.no_grad()
def test_chunks_of_a_long_text_continue_from_its_beginning(family: str) -> None:
    model, own = tiny_model(family), tiny_model(family)
    torch_armllm.patch(model, None, progress=False)
    ids = tiny_ids(1, 300, seed=7)
    hidden = own.base_model(input_ids=ids).last_hidden_state[0]
    prefill = _ChunkedPrefill(model, ids[0].tolist())
    with plan_steps(model) as steps:
        while not prefill.finished:
            prefill.compute_chunk()
    assert steps.count == 2
    torch.testing.assert_close(prefill.last, hidden[-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(prefill.total, hidden.sum(0), rtol=1e-3, atol=1e-2)
