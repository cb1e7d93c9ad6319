"""Steps of `patch` that fail or are interrupted: nothing stays behind."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.models import tiny, token_ids
from torch_armllm.hf.replacements import Replacements
from torch_armllm.lora.slots import AdapterSlots
from torch_armllm.model_survey.stacks import tiny_stacks
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching import install, patch
from torch_armllm.patching.state import STATE, patched_forward
from torch_armllm.quant.inspection import is_packed
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.quantization import Quantization


def replaced(model: Any) -> list[str]:
    """Names what a model and its modules have of their own in the place of methods."""
    names = ("forward", "generate", STATE)
    return [f"{at}.{n}" for at, module in model.named_modules() for n in names if n in module.__dict__]


class Stop(BaseException):
    """An interruption, as Ctrl-C is one."""


STEPS = {
    "the call of the base model": (install, "calls_base"),
    "the loop of generate": (install, "PatchedGenerate"),
    "the wrapper of forward": (install, "with_gradients_by_modules"),
    "the trial": (patch, "fault_of"),
}


@pytest.mark.parametrize("step", STEPS)
def test_nothing_stays_where_a_step_raises(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    model, ids = tiny("llama"), token_ids(1, 9)
    expected = model(ids).logits
    monkeypatch.setattr(*STEPS[step], broken)
    report = torch_armllm.patch(model, None, progress=False)
    assert not report.captured and report.capture_reason == "the rewrite failed with RuntimeError: broken"
    assert replaced(model) == [f".{STATE}"] and report.ops == {} and report.kv_bytes == 0
    assert torch.equal(model(ids).logits, expected) and patched_forward(model) is None
    torch_armllm.unpatch(model)
    assert replaced(model) == []


@pytest.mark.parametrize("step", STEPS)
def test_nothing_stays_after_an_interruption(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise Stop

    model, ids = tiny("llama"), token_ids(1, 9)
    expected = model(ids).logits
    with monkeypatch.context() as broken:
        broken.setattr(*STEPS[step], interrupted)
        with pytest.raises(Stop):
            torch_armllm.patch(model, None, progress=False)
    assert replaced(model) == [] and not torch_armllm.is_patched(model)
    assert torch.equal(model(ids).logits, expected)
    assert torch_armllm.patch(model, None, progress=False).captured


def test_a_model_that_raises_before_its_base_model_keeps_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), token_ids(1, 9)
    own, expected = type(model).forward, model(ids).logits

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        if input_ids.shape[1] == 1:
            raise TypeError("this model needs a picture")
        return own(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    report = torch_armllm.patch(model, None, progress=False)
    assert "this model needs a picture" in str(report.capture_reason)
    assert torch.equal(model(ids).logits, expected)
    assert replaced(model) == [f".{STATE}"]


def test_nothing_stays_of_two_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    model, ids = tiny_stacks("bart"), tiny_ids(1, 7)
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=ids).logits
        monkeypatch.setattr(patch, "fault_of", broken)
        report = torch_armllm.patch(model, None, progress=False)
        assert report.capture_reason == "the rewrite failed with RuntimeError: broken"
        assert replaced(model) == [f".{STATE}"]
        assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, expected)


def test_unpatch_gives_back_what_a_model_had_of_its_own() -> None:
    model = tiny_model("llama")
    own = model.model.forward
    model.model.forward = around = lambda *args, **kwargs: own(*args, **kwargs)
    torch_armllm.patch(model, None, progress=False)
    assert torch_armllm.unpatch(model) == [] and model.model.__dict__["forward"] is around
    assert replaced(model) == ["model.forward"]


def test_replacements_are_undone_in_the_opposite_order() -> None:
    module = torch.nn.Linear(2, 2)

    def interrupted() -> None:
        with Replacements() as changes:
            changes.put(module, "forward", 1)
            changes.put(module, "forward", 2)
            raise Stop

    with pytest.raises(Stop):
        interrupted()
    assert "forward" not in module.__dict__


def test_slots_that_are_refused_leave_the_plan() -> None:
    model = tiny("llama")
    torch_armllm.patch(model, progress=False)
    forward = patched_forward(model)
    with pytest.raises(ValueError, match="has scaled this model's channels"):
        patch.patch_with_slots(model, None, AdapterSlots(1, 4, 8))
    assert forward is not None and patched_forward(model) is forward and model.model.forward is forward


def test_slots_are_refused_before_weights_are_quantized() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="has scaled this model's channels"):
        torch_armllm.patch(model, progress=False, adapter_slots=AdapterSlots(1, 4, 8))
    assert type(model.lm_head) is torch.nn.Linear and replaced(model) == []


def test_an_interruption_leaves_all_weights_quantized_or_none(
    monkeypatch: pytest.MonkeyPatch, sigint_enabled: None
) -> None:
    own, model = Quantization.commit, tiny("llama")
    done: list[str] = []

    def commit(self: Quantization, layer: Layer) -> Any:
        done.append(layer.name)
        if len(done) == 2:
            signal.raise_signal(signal.SIGINT)
        return own(self, layer)

    monkeypatch.setattr(Quantization, "commit", commit)
    with pytest.raises(KeyboardInterrupt):
        torch_armllm.patch(model, progress=False)
    assert len(done) == 15 and is_packed(model) and replaced(model) == []
    report = torch_armllm.patch(model, progress=False)
    assert report.captured and report.share > 0.95
