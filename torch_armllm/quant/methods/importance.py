"""Importance of input channels: their energies on random tokens, so no calibration data is needed.

The output error of a rounded weight is proportional to the energy of its input channel, and a few channels of
a language model carry far more energy than the others.  Random tokens show which channels almost as well as
text does.  llama.cpp's importance matrix is the same measure on calibration text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_armllm.hf.model_kind import ModelKind, is_encoder_decoder, kind_of
from torch_armllm.quant.layers import Layer
from torch_armllm.system.allocator import release_free_memory

_SEQUENCES = 4
_LENGTH = 128
_SEED = 0
_FLOOR = 1e-3
"""Lower bound of an energy, as a fraction of the mean: silent channels still count a little."""


def random_tokens(model: PreTrainedModel) -> Tensor:
    """Returns random token ids (sequences, length), the same for every model with that vocabulary."""
    generator = torch.Generator().manual_seed(_SEED)
    length = min(_LENGTH, _limit(kind_of(model)))
    return torch.randint(model.config.get_text_config().vocab_size, (_SEQUENCES, length), generator=generator)


def _limit(kind: ModelKind) -> int:
    return kind.stated_positions or _SEQUENCES * _LENGTH


@torch.no_grad()
def input_energies(model: nn.Module, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Runs the model once on random tokens and measures the inputs of each layer.

    Args:
        model: a transformers model of text; for any other the result is empty.
        layers: the layers to measure; heads are skipped, as they do not run.

    Returns:
        The mean square of each input channel, by layer name: float32 ``(in_features,)``, 1 on average.
        Layers that no token reached are missing.  The result is empty, with a warning, if the model does not
        run on tokens alone.
    """
    if not isinstance(model, PreTrainedModel) or model.main_input_name not in ("input_ids", "inputs_embeds"):
        return {}
    kind = kind_of(model)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0].detach().float().flatten(0, -2)
            sums[key] = sums.get(key, 0) + x.square().sum(0)
            counts[key] = counts.get(key, 0) + x.shape[0]
            release_free_memory()  # or the freed activations would count at the peak of quantizing

        return hook

    measured = [layer for layer in layers if layer.reason is None and layer.kind != "head"]
    hooks = [layer.module.register_forward_pre_hook(watch(layer.name)) for layer in measured]
    try:
        tokens = random_tokens(model).view(1, -1)[:, : _limit(kind)]
        of_decoder = {"decoder_input_ids": tokens} if is_encoder_decoder(model.config) else {}
        kind.base(input_ids=tokens, use_cache=False, **of_decoder)
    except Exception as error:  # a model may need more than tokens, and fail in any way
        warnings.warn(f"weights are rounded without input importance: {error}", stacklevel=3)
        return {}
    finally:
        for handle in hooks:
            handle.remove()
    energies = {}
    for key, total in sums.items():
        energy = total / max(counts[key], 1)
        mean = float(energy.mean())
        if mean > 0 and bool(energy.isfinite().all()):
            energies[key] = energy / mean + _FLOOR
    return energies
