"""Third-party checkpoints of tiny models, each with a folder of the equivalent float model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.format_results import relative, with_rounded_inputs
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe, load
from torch_armllm.checkpoint.load import load_model
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear

Encode = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""Maps a name and a float weight (N, K) to the tensors of a quantization tool, by suffix, and the equivalent
floats (N, K)."""
UNQUANTIZED = ("embed_tokens", "lm_head", "norm", ".gate.", "wte", "wpe", "ln_")


def write(
    folder: Path, family: str, encode: Encode, settings: dict[str, Any], **overrides: Any
) -> PreTrainedModel:
    """Writes a quantized folder, and returns the equivalent float model."""
    model = tiny(family, **overrides)
    model.save_pretrained(folder / "float")
    model.save_pretrained(folder / "quantized")
    state = load_file(folder / "float" / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    for name, weight in list(state.items()):
        if weight.dim() != 2 or not name.endswith(".weight") or any(part in name for part in UNQUANTIZED):
            quantized[name] = weight
            continue
        parts, state[name] = encode(name, weight)
        quantized.update(
            {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        )
    save_file(state, folder / "float" / "model.safetensors", {"format": "pt"})
    save_file(quantized, folder / "quantized" / "model.safetensors", {"format": "pt"})
    configure(folder / "quantized", settings)
    return AutoModelForCausalLM.from_pretrained(folder / "float", dtype="auto")


def configure(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the ``quantization_config`` of a folder."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edits the tensors of a single-file checkpoint."""
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def check(
    folder: Path,
    expected: PreTrainedModel,
    tolerance: float = 0.05,
    error: float = 0.0,
    nodes: bool = False,
    fuse: bool = False,
) -> Any:
    """Loads a quantized folder and asserts that its weights and logits equal the float model's.

    Weights are compared bit for bit, and logits up to the rounding of activations.

    Args:
        folder: a folder written by `write`.
        expected: the float model.
        tolerance: bound of the relative error of a token's logits, as the median over tokens.
        error: bound of the relative error of a weight; 0 requires equal bits.
        nodes: the graph may run node by node.
        fuse: the float32 logits are those of a plan, not of its modules.

    Returns:
        The loaded model.
    """
    model: Any = load_model(str(folder / "quantized"), dtype="auto")
    packed = 0
    for parameter, value in _decoded(model):
        wanted = expected.get_parameter(parameter)
        if error:
            assert relative(value.flatten(), wanted.flatten().float()) < error, parameter
        else:
            assert torch.equal(value.to(wanted.dtype), wanted), parameter
        packed += 1
    assert packed >= 2 * model.config.num_hidden_layers
    with torch.no_grad():
        ids = token_ids(2, 9)
        got, wanted = model(ids).logits, expected(ids).logits
    # The median over tokens: with rounded activations, a few tokens are routed to other experts.
    assert ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < tolerance
    report = model.hf_quantizer.report
    assert report.captured, str(report)
    assert nodes or not any("node by node" in note for note in report.notes), str(report)
    _check_logits(folder, expected, fuse)
    return model


def _decoded(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the dequantized float32 weights of packed modules, except the head, by parameter name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and name != "lm_head":
            assert module.error is None
            yield f"{name}.weight", module.dequantize()
        elif isinstance(module, QuantExperts):
            assert module.layout is not None
            whole = module.layout.store(*module.dequantize())
            yield from (
                (f"{name}.{part}", one) for part, one in zip(module.layout.weights, whole, strict=True)
            )


def _check_logits(folder: Path, expected: PreTrainedModel, fuse: bool) -> None:
    """Checks that float32 logits with INT8 inputs equal the float model's up to rounding."""
    model: Any = load(str(folder / "quantized"), Recipe(head=None), dtype=torch.float32, fuse=fuse)
    exact = copy.deepcopy(expected).float()
    ids, names = token_ids(1, 6), set()
    with torch.no_grad():
        for parameter, value in _decoded(model):  # in float32: the model's dtype would round them
            exact.get_parameter(parameter).copy_(value)
            names.add(parameter.rpartition(".")[0])
        assert relative(model(ids).logits, with_rounded_inputs(exact, names)(ids).logits) < 2e-3
