"""What stays behind where a step of `patch` fails: nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.models import tiny, token_ids
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching import install, patch
from torch_armllm.patching.forward import PatchedForward
from torch_armllm.patching.replacements import Replacements
from torch_armllm.patching.state import STATE, patched_forward


def replaced(model: Any) -> list[str]:
    """Names what a model and its modules have of their own in the place of methods."""
    names = ("forward", "generate", STATE)
    return [f"{at}.{n}" for at, module in model.named_modules() for n in names if n in module.__dict__]


class Stop(BaseException):
    """An interruption, as Ctrl-C is one."""


STEPS = {
    "the call of the base model": (PatchedForward, "is_called_by"),
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

    from torch_armllm.model_survey.stacks import tiny_stacks

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
    with pytest.raises(Stop), Replacements() as changes:
        changes.put(module, "forward", 1)
        changes.put(module, "forward", 2)
        assert module.forward == 2
        raise Stop
    assert "forward" not in module.__dict__
