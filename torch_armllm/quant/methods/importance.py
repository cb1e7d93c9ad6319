"""How much each input channel of a layer carries, found without data.

A weight's rounding error counts by the energy of the input that it multiplies, and a few channels of a
language model carry far more than the others.  Which ones, the model shows on random tokens almost as well as
on text.  llama.cpp's importance matrix does the same with text for calibration.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.quant.layers import Layer
from torch_armllm.system.allocator import release_free_memory

TOKENS = 512
_SEED = 0
_FLOOR = 1e-3
"""Of the mean energy: channels that random tokens leave silent still count a little."""


@torch.no_grad()
def input_energies(model: nn.Module, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Runs the model once on random tokens and measures what reaches each layer.

    Args:
        model: a transformers model; any other gives nothing.
        layers: whose inputs to measure; heads are left out, they are not run.

    Returns:
        By name of the layer: float32 ``(in_features,)``, the mean square of each input channel,
        1 on average.  Layers that the tokens did not reach are missing; all are, with a warning, where the
        model does not run on tokens alone.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    base = base_model_of(model)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0].detach().float().flatten(0, -2)
            sums[key] = sums.get(key, 0) + x.square().sum(0)
            counts[key] = counts.get(key, 0) + x.shape[0]
            release_free_memory()  # what the layers before left would stand at the peak of quantizing

        return hook

    wanted = [layer for layer in layers if layer.reason is None and layer.kind != "head"]
    hooks = [layer.module.register_forward_pre_hook(watch(layer.name)) for layer in wanted]
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = model.config.get_text_config().vocab_size
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or TOKENS
    tokens = torch.randint(vocabulary, (1, min(TOKENS, limit)), generator=generator)
    try:
        base(input_ids=tokens, use_cache=False)
    except Exception as error:  # a model may ask for more than tokens, in whatever way
        warnings.warn(f"weights are rounded without regard to inputs: {error}", stacklevel=3)
        return {}
    finally:
        for handle in hooks:
            handle.remove()
    found = {}
    for key, total in sums.items():
        energy = total / max(counts[key], 1)
        mean = float(energy.mean())
        if mean > 0 and bool(energy.isfinite().all()):
            found[key] = energy / mean + _FLOOR
    return found
