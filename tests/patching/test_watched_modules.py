"""Models that are changed after `patch`: calls compute what the changed modules do, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_armllm
from tests.support.models import tiny, token_ids
from torch_armllm.patching.generation.decode_steps import DecodeSteps

IDS = token_ids(2, 12)
REPLACED, WRITTEN = "modules or parameters were replaced", "weights were changed"


def mlp(model: Any, layer: int = 1) -> Any:
    return model.base_model.layers[layer].mlp


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def with_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    try:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    except ValueError as error:  # the newest transformers may ask for a PEFT that is not released yet
        pytest.skip(str(error))
    model.eval()


def with_parametrization(model: Any) -> None:
    layer = nn.utils.parametrizations.weight_norm(mlp(model).up_proj)
    layer.parametrizations.weight.original0.data.mul_(2)


def with_other_forward(model: Any) -> None:
    own = mlp(model).forward
    mlp(model).forward = lambda x: 2 * own(x)


def with_other_values(model: Any) -> None:
    weight = mlp(model).up_proj.weight
    weight.data = 2 * weight.data


def scale(weight: Tensor) -> None:
    weight.mul_(2)


def with_one_other_value(model: Any) -> None:
    mlp(model).up_proj.weight[0, 0] = 5


def with_other_state_dict(model: Any) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "peft": (REPLACED, adapted),
    "merged adapter": (WRITTEN, lambda m: adapted(m).merge_and_unload()),
    "add_adapter": (REPLACED, with_adapter),
    "resized": (WRITTEN, lambda m: m.resize_token_embeddings(120) and None),
    "embedding": (REPLACED, lambda m: m.set_input_embeddings(nn.Embedding(97, 64))),
    "module": (REPLACED, lambda m: m.base_model.layers.__setitem__(1, m.base_model.layers[0])),
    "parameter": (REPLACED, lambda m: setattr(mlp(m).up_proj, "weight", nn.Parameter(torch.ones(96, 64)))),
    "deleted layer": (REPLACED, lambda m: m.base_model.layers.pop(1) and None),
    "parametrization": (REPLACED, with_parametrization),
    "hook": ("hooks", lambda m: mlp(m).register_forward_hook(lambda *call: 2 * call[2]) and None),
    "hook before": ("hooks", lambda m: mlp(m).register_forward_pre_hook(lambda _, x: (2 * x[0],)) and None),
    "forward": ("forward", with_other_forward),
    "dtype": (WRITTEN, lambda m: m.to(torch.bfloat16) and None),
    "in place": (WRITTEN, lambda m: scale(mlp(m).up_proj.weight)),
    "in place by data": (WRITTEN, lambda m: scale(mlp(m).up_proj.weight.data)),
    "other data": (WRITTEN, with_other_values),
    "one value": (WRITTEN, with_one_other_value),
    "state dict": (
        WRITTEN,
        with_other_state_dict,
    ),
    "training": ("training mode", lambda m: m.train() and None),
}


def twins() -> tuple[Any, Any]:
    model = tiny("llama")
    assert torch_armllm.patch(model, None, progress=False).captured
    return model, tiny("llama")


@torch.no_grad()
def changed(model: Any, change: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    return change(model) or model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_compute_by_their_modules(name: str) -> None:
    reason, change = CHANGES[name]
    model, own = (changed(each, change) for each in twins())
    with pytest.warns(UserWarning, match=f"{reason}.*module by module"):
        found = logits(model)
    assert torch.equal(found, logits(own))
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(input_ids=IDS, **settings), own.generate(input_ids=IDS, **settings))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.set_output_embeddings(nn.Linear(64, 97)),
        lambda m: setattr(m.lm_head, "weight", m.base_model.embed_tokens.weight),
        lambda m: m.lm_head.register_forward_hook(lambda *call: -call[2]) and None,
        lambda m: m.base_model.register_forward_hook(lambda *call: None) and None,
    ],
    ids=["head", "tied head", "hook of the head", "hook of the base"],
)
def test_what_lies_past_the_plan_acts(change: Callable[[Any], Any], recwarn: pytest.WarningsRecorder) -> None:
    model, own = (changed(each, change) for each in twins())
    torch.testing.assert_close(logits(model), logits(own), atol=1e-4, rtol=1e-4)
    assert not [w for w in recwarn if "torch_armllm" in str(w.message)]


def test_hooks_of_head_and_base_run_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeSteps, "decode", None)
    model = tiny("llama")
    torch_armllm.patch(model, progress=False)
    calls: list[int] = []
    for module in (model, model.base_model, model.lm_head):
        module.register_forward_hook(lambda *_: calls.append(1))
    model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert len(calls) == 15


@pytest.mark.parametrize("name", ["peft", "hook", "in place by data", "embedding"])
@torch.no_grad()
def test_changes_between_steps_are_seen(name: str) -> None:
    change = CHANGES[name][1]
    results = []
    for each in twins():
        cache = each(IDS, use_cache=True).past_key_values
        model = changed(each, change)
        results.append(model(input_ids=IDS[:, :1], past_key_values=cache).logits)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:torch_armllm")
def test_the_plan_goes_on_once_a_hook_is_gone() -> None:
    model, _ = twins()
    expected = logits(model)
    handle = mlp(model).register_forward_hook(lambda *call: 2 * call[2])
    assert not torch.equal(logits(model), expected)
    handle.remove()
    assert torch.equal(logits(model), expected)


@torch.no_grad()
def test_recorders_of_transformers_do_not_end_the_plan(recwarn: pytest.WarningsRecorder) -> None:
    model, _ = twins()
    expected = logits(model)
    assert len(model(IDS, output_hidden_states=True).hidden_states) == 3
    recwarn.clear()
    assert torch.equal(logits(model), expected)
    assert not [w for w in recwarn if "torch_armllm" in str(w.message)]


def test_patching_anew_takes_the_changes() -> None:
    model, own = (changed(each, CHANGES["in place"][1]) for each in twins())
    torch_armllm.unpatch(model)
    assert torch_armllm.patch(model, None, progress=False).captured
    torch.testing.assert_close(logits(model), logits(own), atol=1e-5, rtol=1e-5)


def test_encoders_are_watched() -> None:
    from transformers import AutoModel, BertConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 80}
    model = AutoModel.from_config(BertConfig(vocab_size=97, **sizes)).eval()
    torch_armllm.patch(model, None, progress=False)
    before = model(IDS)[0]
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(3)
    with pytest.warns(UserWarning, match=WRITTEN):
        assert not torch.allclose(model(IDS)[0], before, atol=1e-2)
