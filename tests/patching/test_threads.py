"""Threads that share a patched model compute what one thread does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, BertConfig

import torch_armllm
from tests.support.models import tiny, token_ids
from torch_armllm.patching.state import patched_forward

INPUTS = [token_ids(1 + n % 3, 5 + 3 * n, seed=n) for n in range(8)]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    """A patched model: one of float layers, one that runs node by node, and a hybrid."""
    model = tiny(request.param)
    torch_armllm.patch(model, "int4" if request.param == "qwen3_next" else None, progress=False)
    return model


def in_threads(compute: Callable[[Tensor], Tensor], rounds: int = 6) -> None:
    """Checks that results in threads are those of one thread."""
    expected = [compute(ids) for ids in INPUTS]
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(compute, INPUTS * rounds)
    assert all(map(torch.equal, found, expected * rounds))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("use_cache", [False, True])
def test_forward(model: Any, use_cache: bool) -> None:
    @torch.no_grad()
    def logits(ids: Tensor) -> Tensor:
        out = model(ids, use_cache=use_cache)
        if not use_cache:
            return out.logits
        return model(ids[:, :1], past_key_values=out.past_key_values).logits

    in_threads(logits)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generate(model: Any, settings: dict[str, Any]) -> None:
    def tokens(ids: Tensor) -> Tensor:
        return model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, **settings)

    in_threads(tokens, rounds=2)


@pytest.mark.usefixtures("one_thread")
def test_encoder() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 80}
    model = AutoModel.from_config(BertConfig(vocab_size=97, **sizes)).eval()
    torch_armllm.patch(model, None, progress=False)
    in_threads(lambda ids: model(ids)[0].detach())


def test_what_a_thread_asks_for_is_its_own() -> None:
    model = tiny("llama")
    torch_armllm.patch(model, None, progress=False)
    forward = patched_forward(model)
    ids = token_ids(1, 6)
    hidden = torch.ones(1, 6, 64)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        expected = model(ids).logits
        with forward.returning(hidden), forward.by_modules("a test"):
            assert torch.equal(model(ids).logits, model.lm_head(hidden))
            assert torch.equal(pool.submit(torch.no_grad()(model), ids).result().logits, expected)
