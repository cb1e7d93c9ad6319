"""Invalid models and calls: error messages are clear and the model stays unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_armllm
from tests.support.models import tiny, token_ids
from tests.support.patched_models import fresh
from torch_armllm.patching import build_plan
from torch_armllm.quant import inplace, packing
from torch_armllm.quant.spill_file import SpillFile


def contents(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of all parameters and buffers in a model's state dict."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def assert_untouched(model: Any, before: dict[str, torch.Tensor], logits: torch.Tensor) -> None:
    """Asserts that the model has the same bits, is not patched, and returns the same logits."""
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype
        for name, tensor in before.items()
    )
    assert not torch_armllm.is_patched(model)
    assert torch.equal(model(token_ids()).logits, logits)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Fault(RuntimeError):
    """The injected failure."""


@torch.no_grad()
@pytest.mark.parametrize("failing", [0, 5, 14])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("mixtral", False)])
def test_failure_at_any_layer_leaves_the_model_unchanged(
    monkeypatch: pytest.MonkeyPatch, failing: int, family: str, tied: bool
) -> None:
    model = tiny(family, torch.bfloat16, tie_word_embeddings=tied)
    before, logits = contents(model), model(token_ids()).logits
    calls = 0
    real = packing._quantize

    def fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > failing:
            raise Fault
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_quantize", fails)
        with pytest.raises(Fault):
            torch_armllm.patch(model, progress=False)
    assert_untouched(model, before, logits)
    assert all(layer.quantized or layer.kind == "router" for layer in inplace.quantize(model, progress=False))


@torch.no_grad()
def test_failed_capture_leaves_working_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for quantize in (None, "int4"):
        model = tiny("llama")
        before, logits = contents(model), model(token_ids()).logits
        with monkeypatch.context() as patched:
            patched.setattr(build_plan, "make_plan", lambda module, native: 1 / 0)
            report = torch_armllm.patch(model, quantize, progress=False)
        assert not report.captured and "ZeroDivisionError" in str(report)
        got = model(token_ids()).logits
        assert (got - logits).norm() < (0.5 if quantize else 1e-6) * logits.norm()
        torch_armllm.unpatch(model)
        if quantize is None:
            assert_untouched(model, before, logits)


@torch.no_grad()
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("family", "layer", "parameter"),
    [
        ("llama", "model.layers.1.mlp.down_proj", "weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts", "down_proj"),
        ("gpt2", "lm_head", "weight"),
    ],
)
def test_non_finite_weights_raise(family: str, layer: str, parameter: str, bad: float) -> None:
    model = tiny(family)
    weight = getattr(model.get_submodule(layer), parameter)
    place = (1,) * weight.dim()
    good = float(weight[place])
    weight[place] = bad
    kinds = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(
        ValueError, match=rf"{layer} holds {bad} at \({', '.join('1' * weight.dim())}\)"
    ) as error:
        torch_armllm.patch(model, progress=False)
    assert "ignore=" in str(error.value)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    weight[place] = good
    assert_untouched(model, contents(model), model(token_ids()).logits)


@torch.no_grad()
def test_positions_beyond_the_maximum_raise_and_store_nothing() -> None:
    model = fresh("llama", quantization=None)
    model.config.max_position_embeddings = 16
    cache = model(token_ids(1, 12), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="reaches position 16, but max_position_embeddings is 16: shorten"):
        model(token_ids(1, 5), past_key_values=cache)
    assert cache.get_seq_length() == 12
    assert model(token_ids(1, 4), past_key_values=cache).logits.isfinite().all()
    model.config.rope_parameters["rope_type"] = "dynamic"
    assert model(token_ids(1, 40)).logits.isfinite().all()


@torch.no_grad()
def test_unmerged_adapters_raise() -> None:
    peft = pytest.importorskip("peft")
    model = tiny("llama")
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options)).eval()
    expected = adapted(token_ids()).logits
    for unmerged in (adapted, model):
        with pytest.raises(ValueError, match=r"not merged \(.*q_proj is the first of 4\).*merge_and_unload"):
            torch_armllm.patch(unmerged, progress=False)
    merged = adapted.merge_and_unload()
    torch_armllm.patch(merged, None, progress=False)
    torch.testing.assert_close(merged(token_ids()).logits, expected, atol=1e-4, rtol=1e-4)


def test_wrapped_layers_raise_without_peft() -> None:
    class Wrapper(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.active_adapters = ["default"]

    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj = Wrapper(attention.o_proj)
    with pytest.raises(ValueError, match=r"not merged \(model.layers.1.self_attn.o_proj is the first of 1\)"):
        torch_armllm.patch(model, progress=False)


@pytest.mark.parametrize("in_memory", [0, 100, 1 << 20])
@pytest.mark.parametrize("disk", ["roomy", "full", "read-only"])
def test_spill_file_restores_buffers(monkeypatch: pytest.MonkeyPatch, in_memory: int, disk: str) -> None:
    if disk == "full":
        monkeypatch.setattr(
            SpillFile, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
    elif disk == "read-only":
        monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    modules = []
    for index, shape in enumerate([(3, 5), (0, 4), (7,)]):
        module = nn.Module()
        module.register_buffer("a", torch.arange(100)[: torch.Size(shape).numel()].view(shape) + index)
        module.register_buffer("b", torch.full((4, 16), index, dtype=torch.uint8))
        modules.append(module)
    before = [contents(module) for module in modules]
    spill = SpillFile(in_memory)
    for module in modules:
        whole, module.b = module.b, module.b.to("meta")
        for rows in whole.split(3):
            spill.append(module, "b", rows)
        spill.store(module)
        assert all(buffer.is_meta for buffer in module.buffers())
    for module, expected in reversed(list(zip(modules, before, strict=True))):
        spill.load(module)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
