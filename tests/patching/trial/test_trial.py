"""The trial after `patch`: faults between users and the plan are named, and nothing is disturbed."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.models import tiny, token_ids
from torch_armllm.hf.cache_names import usual_name
from torch_armllm.model_survey.stacks import tiny_stacks
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config, tiny_ids
from torch_armllm.patching.forwards.attending_calls import AttendingCalls
from torch_armllm.patching.forwards.calls import CallArguments, TokenCalls
from torch_armllm.patching.forwards.decoder_calls import DecoderCalls
from torch_armllm.patching.forwards.text_calls import TextCalls
from torch_armllm.patching.generation.token_loop import TokenLoop
from torch_armllm.patching.state import patched_forward
from torch_armllm.patching.trial.judge import Judge, centered

MonkeyPatch = pytest.MonkeyPatch


def forgets_context(monkeypatch: MonkeyPatch) -> None:
    """Steps begin a new cache, as with a cache under a name that is not known."""
    own = DecoderCalls._cache
    monkeypatch.setattr(DecoderCalls, "_cache", lambda self, past, *rest: own(self, None, *rest))


def returns_no_cache(monkeypatch: MonkeyPatch) -> None:
    own = TokenCalls.output
    monkeypatch.setattr(TokenCalls, "output", lambda self, hidden, cache, call: own(self, hidden, None, call))


def lacks_a_field(monkeypatch: MonkeyPatch) -> None:
    own = TokenCalls.output

    def output(self: Any, hidden: Tensor, cache: Any, call: CallArguments) -> Any:
        if cache is None:  # installing asks what the head does
            return own(self, hidden, cache, call)
        raise AttributeError("'Output' has no attribute 'image_hidden_states'")

    monkeypatch.setattr(TokenCalls, "output", output)


def ignores_masks(monkeypatch: MonkeyPatch) -> None:
    own = DecoderCalls._step

    def step(self: Any, cache: Any, call: CallArguments, *rest: Any) -> Tensor:
        return own(self, cache, CallArguments({**call.named, "attention_mask": None}, call.past), *rest)

    monkeypatch.setattr(DecoderCalls, "_step", step)


def generates_one_token(monkeypatch: MonkeyPatch) -> None:
    own = TokenLoop.__call__

    def loop(self: Any, model: Any, input_ids: Tensor, *rest: Any, **more: Any) -> Any:
        tokens = own(self, model, input_ids, *rest, **more)
        tokens[:, input_ids.shape[1] :] = 5
        return tokens

    monkeypatch.setattr(TokenLoop, "__call__", loop)


FAULTS: dict[Callable[[MonkeyPatch], None], str] = {
    forgets_context: rf"computes something else in a loop with {usual_name()} by its plan than by",
    returns_no_cache: rf"a loop with {usual_name()}",
    lacks_a_field: r"raises AttributeError in a prompt by its plan: 'Output' has no attribute 'image_",
    ignores_masks: r"a pair padded on the left",
    generates_one_token: r"computes something else in generate",
}


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_named_and_modules_stay(
    fault: Callable[[MonkeyPatch], None], quantization: str | None, monkeypatch: MonkeyPatch
) -> None:
    if fault is generates_one_token and quantization is None:
        pytest.skip("transformers' own loop generates with a float head")
    twin, ids = tiny("llama", torch.bfloat16), token_ids(1, 9)
    fault(monkeypatch)
    model = tiny("llama", torch.bfloat16)
    report = torch_armllm.patch(model, quantization, progress=False)
    assert not report.captured and patched_forward(model) is None
    assert report.capture_reason is not None
    assert re.search(FAULTS[fault], report.capture_reason), report.capture_reason
    assert "forward" not in model.__dict__ and "forward" not in model.model.__dict__
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True)[usual_name()]
        step = model(ids[:, -1:], **{usual_name(): cache}).logits[0, -1].float()
        expected = twin(ids).logits[0, -1].float()
    assert float((step - expected).norm()) < (0.2 if quantization else 0.02) * float(expected.norm())


def test_lost_context_of_two_stacks_is_named(monkeypatch: MonkeyPatch) -> None:
    own = AttendingCalls._cache
    monkeypatch.setattr(AttendingCalls, "_cache", lambda self, past, *rest: own(self, None, *rest))
    report = torch_armllm.patch(tiny_stacks("bart"), None, progress=False)
    assert f"in a loop with {usual_name()}" in str(report.capture_reason)


def test_ignored_padding_of_an_encoder_is_named(monkeypatch: MonkeyPatch) -> None:
    own = TextCalls._compute
    monkeypatch.setattr(TextCalls, "_compute", lambda self, ids, kept, *rest: own(self, ids, None, *rest))
    from transformers import AutoModel

    model = build_tiny(AutoModel, tiny_config("bert", is_decoder=False))
    assert "a pair padded on the left" in str(torch_armllm.patch(model, None, progress=False).capture_reason)


def test_int4_keys_are_no_fault() -> None:
    assert torch_armllm.patch(tiny("llama", head_dim=32), progress=False, kv_cache_dtype="int4").captured


def test_int4_keys_hide_no_fault(monkeypatch: MonkeyPatch) -> None:
    forgets_context(monkeypatch)
    report = torch_armllm.patch(tiny("llama", head_dim=32), progress=False, kv_cache_dtype="int4")
    assert f"a loop with {usual_name()}" in str(report.capture_reason)


def test_models_that_refuse_a_way_are_not_judged_by_it(monkeypatch: MonkeyPatch) -> None:
    model = tiny("llama")
    own = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None:
            raise ValueError("no masks")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    assert torch_armllm.patch(model, None, progress=False).captured


def test_nothing_is_disturbed(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama", eos_token_id=list(range(90)))
    model.generation_config.do_sample = True
    settings, once = model.generation_config, logging.Logger.warning_once  # type: ignore[attr-defined]
    calls: list[Any] = []
    model.register_forward_hook(lambda *given: calls.append(given))
    hooks = dict(model._forward_hooks)
    random = torch.random.get_rng_state()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "transformers"):
        warnings.simplefilter("error")
        report = torch_armllm.patch(model, progress=False)
    assert report.captured and not caplog.records
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.generation_config is settings and settings.do_sample
    assert logging.Logger.warning_once is once and dict(model._forward_hooks) == hooks  # type: ignore[attr-defined]
    forward = patched_forward(model)
    assert forward is not None and not forward._warned
    with torch.no_grad(), pytest.warns(UserWarning, match="output_hidden_states is requested"):
        model(tiny_ids(1, 5), output_hidden_states=True)


def test_tokens_that_a_model_excludes_are_compared_with_its_least_ones() -> None:
    logits = torch.tensor([[3.0, -1.0, 2.0, 0.0]])
    excluding = logits.index_fill(1, torch.tensor([3]), torch.finfo(torch.float32).min)
    assert torch.equal(centered(excluding), centered(torch.tensor([[3.0, -1.0, 2.0, -1.0]])))
    half = excluding.clamp(min=torch.finfo(torch.bfloat16).min).bfloat16()
    assert torch.equal(centered(half), centered(excluding))
    judge = Judge("a model", [], 0.02)
    assert not judge.is_far([centered(excluding)], [centered(excluding)])
    assert judge.is_far([centered(logits)], [centered(excluding)])
