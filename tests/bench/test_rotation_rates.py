"""The comparison of rates with and without rotated inputs, on a model of two layers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench import rotation_rates
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.model_survey.tiny_models import tiny_config
from torch_armllm.quant.modules.linear import QuantLinear


def test_the_second_model_differs_by_rotation_alone(tmp_path: Path) -> None:
    plain, rotated = tmp_path / "plain", tmp_path / "rotated"
    save_random_model(tiny_config("llama"), plain)
    rotation_rates.rotate_folder(plain, rotated)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (plain, rotated)]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(state, states[1][name]) for name, state in states[0].items())
    for model, expected in zip(models, (False, True), strict=True):
        layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        assert layers and {layer.rotated for layer in layers} == {expected}
    rates = rotation_rates.compare((models[0], models[1]), "decode 8", rounds=2)
    assert min(rates.values()) > 0
