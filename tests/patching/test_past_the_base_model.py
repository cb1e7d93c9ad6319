"""Models whose ``forward`` calls a part of its base model, past the base model's own ``forward``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import torch_armllm
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching.state import patched_forward

FAMILIES = ("opt", "whisper", "bart")


@pytest.mark.parametrize("family", FAMILIES)
def test_models_call_the_plan(family: str) -> None:
    model, own, ids = tiny_model(family), tiny_model(family), tiny_ids(2, 12)
    torch_armllm.patch(model, None, progress=False)
    forward = patched_forward(model)
    assert forward is not None
    steps, run = [], forward.plan.run
    forward.plan.run = lambda inputs: steps.append(inputs.tokens) or run(inputs)  # type: ignore[method-assign, func-returns-value]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")
        torch.testing.assert_close(model(ids).logits, own(ids).logits, rtol=1e-3, atol=1e-4)
        assert steps == [24]
        arguments: dict[str, Any] = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False)
        assert torch.equal(model.generate(ids, **arguments), own.generate(ids, **arguments))
    torch_armllm.unpatch(model)
    assert torch.equal(model(ids).logits, own(ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_return_the_tokens_of_the_model(family: str) -> None:
    model, ids = tiny_model(family), tiny_ids(1, 12)
    logits = model(ids).logits[0].detach().log_softmax(-1)
    llm = torch_armllm.LLM(
        model, quantization=None, skip_tokenizer_init=True, progress=False, kv_cache_memory=4 << 20
    )
    params = torch_armllm.SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": ids[0].tolist()}, params)
    best = int(logits[-1].argmax())
    assert output.outputs[0].token_ids == [best]
    found = output.outputs[0].logprobs
    assert found is not None
    assert found[0][best].logprob == pytest.approx(float(logits[-1, best]), abs=1e-3)


def test_models_that_call_no_base_model_run_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), tiny_ids(1, 12)
    logits = model(ids).logits
    around = type(model.model).forward
    original = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(self.model.__dict__, "forward", around.__get__(self.model))
            return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    report = torch_armllm.patch(model, None, progress=False)
    assert not report.captured and "calls parts of its LlamaModel itself" in str(report.capture_reason)
    assert "forward" not in model.model.__dict__ and torch.equal(model(ids).logits, logits)
