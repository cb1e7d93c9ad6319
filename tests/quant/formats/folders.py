"""Folders as other tools write them, of tiny models, each beside one of the floats that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import tiny, token_ids
from torch_armllm.checkpoint import load_model
from torch_armllm.quant import QuantExperts, QuantLinear

Encode = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""Name and float weight (N, K) to the tensors that a tool writes, by the ends of their names, and the floats
(N, K) that these stand for."""
LEFT = ("embed_tokens", "lm_head", "norm", ".gate.", "wte", "wpe", "ln_")


def write(
    folder: Path, family: str, encode: Encode, settings: dict[str, Any], **overrides: Any
) -> PreTrainedModel:
    """Writes a quantised folder, and gives the float model that it stands for."""
    model = tiny(family, **overrides)
    model.save_pretrained(folder / "float")
    model.save_pretrained(folder / "quantised")
    state = load_file(folder / "float" / "model.safetensors")
    quantised: dict[str, Tensor] = {}
    for name, weight in list(state.items()):
        if weight.dim() != 2 or not name.endswith(".weight") or any(part in name for part in LEFT):
            quantised[name] = weight
            continue
        parts, state[name] = encode(name, weight)
        quantised.update(
            {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        )
    save_file(state, folder / "float" / "model.safetensors", {"format": "pt"})
    save_file(quantised, folder / "quantised" / "model.safetensors", {"format": "pt"})
    configure(folder / "quantised", settings)
    return AutoModelForCausalLM.from_pretrained(folder / "float", dtype="auto")


def configure(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the ``quantization_config`` of a folder."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edits the tensors of a folder of one file."""
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def check(folder: Path, expected: PreTrainedModel, tolerance: float = 0.05) -> Any:
    """Loads a quantised folder: its integers stand for the expected floats bit by bit, and so do its logits
    to the rounding of activations.

    Returns:
        The loaded model.
    """
    model: Any = load_model(str(folder / "quantised"), dtype="auto")
    packed = 0
    for name, module in model.named_modules():
        if name == "lm_head":
            continue
        if isinstance(module, QuantLinear):
            assert module.error is None
            wanted = expected.get_submodule(name).weight
            assert torch.equal(module.dequantize().to(wanted.dtype), wanted), name
            packed += 1
        elif isinstance(module, QuantExperts):
            assert module.layout is not None
            whole = module.layout.store(*module.dequantize())
            for attribute, value in zip(module.layout.weights, whole, strict=True):
                wanted = getattr(expected.get_submodule(name), attribute)
                assert torch.equal(value.to(wanted.dtype), wanted), name
            packed += 1
    assert packed >= 2 * model.config.num_hidden_layers
    with torch.no_grad():
        ids = token_ids(2, 9)
        got, wanted = model(ids).logits, expected(ids).logits
    # the median of the tokens: rounded activations let a few of them choose other experts
    assert ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < tolerance
    report = model.hf_quantizer.report
    assert report.captured and not any("node by node" in note for note in report.notes), str(report)
    return model
