"""AWQ scales the channels where rounding costs most, and the float model's function does not change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.quant.methods.loud_model import loud
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.methods.calibrated.awq import Awq
from torch_armllm.quant.methods.calibrated.layerwise import Stages
from torch_armllm.quant.methods.calibrated.scaling_search import find_scalings
from torch_armllm.quant.methods.calibrated.stage_scaling import readers_in
from torch_armllm.quant.schemes.registry import scheme_named

TOKENS = torch.randint(97, (8, 32), generator=torch.Generator().manual_seed(3))
FOLDED = {
    "llama": {
        "input_layernorm": {"q_proj", "k_proj", "v_proj"},
        "post_attention_layernorm": {"gate_proj", "up_proj"},
        "self_attn.v_proj": {"o_proj"},
        "mlp.up_proj": {"down_proj"},
    },
    "mixtral": {
        "input_layernorm": {"q_proj", "k_proj", "v_proj"},
        "post_attention_layernorm": {"gate", "experts"},
        "self_attn.v_proj": {"o_proj"},
        "mlp.experts": {"experts"},
    },
    "gpt_oss": {
        "input_layernorm": {"q_proj", "k_proj", "v_proj"},
        "post_attention_layernorm": {"router", "experts"},
        "self_attn.v_proj": {"o_proj"},
    },
    "gpt2": {"ln_1": {"c_attn"}, "ln_2": {"c_fc"}},
}


@pytest.mark.parametrize("kind", FOLDED)
def test_scalings_are_found_by_tracing_a_layer(kind: str) -> None:
    model = tiny(kind)
    stages = Stages(model, TOKENS, batch=4)
    stage = stages.modules[0]
    readers = readers_in(stage, {})
    names = {id(module): name for name, module in stage.named_modules()}
    with torch.no_grad():
        scalings, refused = find_scalings(stage, readers, lambda: stages.probe(0))
    found = {
        names[id(x.writer.module)]: {names[id(r.module)].split(".")[-1] for r in x.readers} for x in scalings
    }
    assert found == FOLDED[kind]
    assert refused == (["mlp.c_fc for mlp.c_proj"] if kind == "gpt2" else [])


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_scaling_does_not_change_logits_bitwise(kind: str) -> None:
    model, ids = loud(kind), token_ids(2, 20)
    layers = [x for x in find_layers(model) if x.reason is None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(ids).logits
        method = Awq(model, layers, TOKENS)
        for layer in method.order(layers):
            method.rounding(layer, scheme_named("g32i"))
        changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
        assert len(changed) > 4
        assert torch.equal(model(ids).logits, expected)
        method.abandon()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_awq_reduces_the_logit_error_of_rtn() -> None:
    ids = token_ids(2, 40)
    with torch.no_grad():
        expected = loud("llama")(ids).logits
    errors = []
    for method, calibration in (("rtn", None), ("awq", TOKENS)):
        model = loud("llama")
        quantize(model, Recipe("row", method=method), progress=False, calibration=calibration)
        with torch.no_grad():
            errors.append(float((model(ids).logits - expected).norm()))
    assert errors[1] < 0.8 * errors[0]


def test_failure_restores_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loud("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(Awq, "on_packed", lambda *_: (_ for _ in ()).throw(RuntimeError("no more")))
    with pytest.raises(RuntimeError, match="no more"):
        quantize(model, Recipe(method="awq"), progress=False, calibration=TOKENS)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
