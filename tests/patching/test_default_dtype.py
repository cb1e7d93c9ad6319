"""Models are patched and served alike whatever torch's default dtype is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.models import tiny, token_ids

IDS = token_ids(1, 9)


DTYPES = (torch.float64, torch.bfloat16, torch.float16)
CASES = [
    *(("llama", "int4", dtype) for dtype in DTYPES),
    ("gemma3_text", "int4", torch.bfloat16),
    ("gpt2", None, torch.float16),
]


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def results(model: Any, quantization: str | None) -> list[Tensor]:
    """Logits, and tokens of ``generate``."""
    report = torch_armllm.patch(model, quantization, progress=False)
    assert report.captured, report.capture_reason
    with torch.no_grad():
        return [model(IDS).logits, model.generate(IDS, max_new_tokens=4, do_sample=False)]


@pytest.mark.parametrize(
    ("family", "quantization", "default_dtype"), CASES, indirect=["default_dtype"], ids=str
)
def test_patch(family: str, quantization: str | None, default_dtype: torch.dtype) -> None:
    model, own = tiny(family), tiny(family)
    found = results(model, quantization)
    assert torch.get_default_dtype() is default_dtype
    torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, results(own, quantization)))


@pytest.mark.parametrize("default_dtype", DTYPES, indirect=True, ids=str)
def test_an_engine(default_dtype: torch.dtype) -> None:
    found = []
    for dtype in (default_dtype, torch.float32):
        torch.set_default_dtype(torch.float32)  # the random weights depend on it
        model = tiny("llama")
        torch.set_default_dtype(dtype)
        llm = torch_armllm.LLM(model, skip_tokenizer_init=True, progress=False)
        settings = torch_armllm.SamplingParams(max_tokens=5, seed=1, logprobs=2)
        found.append(llm.generate([{"prompt_token_ids": IDS[0].tolist()}], settings)[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids and found[0].logprobs == found[1].logprobs
