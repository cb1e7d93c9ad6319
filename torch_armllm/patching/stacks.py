"""Installs the plans of a model of two stacks: an encoder, and a decoder that attends to its tokens."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.markers.encoder_states import with_encoder
from torch_armllm.capture.sample import sample_ids
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.decoder_forward import DecoderForward
from torch_armllm.patching.encoder_forward import EncoderForward
from torch_armllm.patching.encoder_layers import plan_layers
from torch_armllm.patching.encoder_layers_forward import EncoderLayersForward, is_close
from torch_armllm.patching.forward import with_gradients_by_modules
from torch_armllm.patching.install import Installed
from torch_armllm.patching.op_counts import op_counts
from torch_armllm.patching.replacements import Replacements
from torch_armllm.quant.inspection import is_packed
from torch_armllm.quant.modules.linear import QuantLinear

_TOKENS = 14


def install_stacks(model: Any, replaced: Replacements) -> Installed:
    """Replaces the ``forward`` of a model's encoder and decoder by plans.

    Args:
        model: a model that generates with two stacks.
        replaced: gets what is replaced.

    Returns:
        What is installed; a note says why an encoder keeps its modules.

    Raises:
        CaptureError: the decoder keeps its modules.
    """
    encoder, decoder = model.get_encoder(), model.get_decoder()
    ops: Counter[str] = Counter()
    notes: list[str] = []
    if encoder is model or decoder is model or not hasattr(decoder, "config"):
        raise CaptureError(f"{type(model).__name__} has no encoder and decoder that are models themselves")
    try:
        forward, rounding = _decoder_forward(decoder, is_packed(model), notes, ops)
    except CaptureError as error:
        raise CaptureError(f"{type(decoder).__name__}: {error}") from error
    encoding = _encoder_forward(encoder, notes, ops)
    by_plans = with_gradients_by_modules(model, *(f for f in (forward, encoding) if f is not None))
    replaced.put(decoder, "forward", forward)
    replaced.put(model, "forward", by_plans)
    if encoding is not None:
        replaced.put(encoder, "forward", encoding)
    kv_bytes = forward.shape.bytes_per_token
    return Installed(forward, rounding, dict(ops), kv_bytes, notes=notes, encoder=encoding)


def _decoder_forward(
    decoder: Any, quantized: bool, notes: list[str], ops: Counter[str]
) -> tuple[DecoderForward, float]:
    """Returns the ``forward`` of a decoder's plan, and the error of its hidden states that is known.

    Raises:
        CaptureError: it has none, or computes something else.
    """
    with with_encoder(decoder):
        built = build_plan(decoder, quantized, None)
    if built.looks_ahead:
        raise CaptureError("its tokens attend to later ones")
    vocabulary = decoder.get_input_embeddings().num_embeddings
    forward = DecoderForward(decoder, built.plan, built.shape, vocabulary, built.most_tokens)
    ids = sample_ids(vocabulary, _TOKENS).expand(2, -1)
    states = torch.ops.armllm.encoder_states(ids, decoder.get_input_embeddings().embedding_dim, decoder.dtype)
    arguments = {"encoder_hidden_states": torch.cat([states, states.flip(1)]), "use_cache": False}
    expected = decoder(input_ids=ids, **arguments).last_hidden_state
    if not is_close(forward(input_ids=ids, **arguments).last_hidden_state, expected):
        raise CaptureError("it computes something else from its own cache than from its modules'")
    notes += built.notes
    ops.update(op_counts(built.graph))
    return forward, built.rounding


def _encoder_forward(
    encoder: Any, notes: list[str], ops: Counter[str]
) -> EncoderForward | EncoderLayersForward | None:
    """Returns the ``forward`` of an encoder's plan; None if it keeps its modules, which a note says."""
    kind = type(encoder).__name__
    takes_ids = "input_ids" in inspect.signature(encoder.forward).parameters
    try:
        if not takes_ids and not isinstance(getattr(encoder, "layers", None), nn.ModuleList):
            raise CaptureError("its inputs are no token ids, and it has no list of layers")
        quantized = any(isinstance(m, QuantLinear) for m in encoder.modules())
        forward: EncoderForward | EncoderLayersForward
        if takes_ids:
            built = build_plan(encoder, quantized, None)
            if not built.looks_ahead:
                raise CaptureError("its tokens do not attend to later ones")
            vocabulary = int(encoder.get_input_embeddings().num_embeddings)
            forward = EncoderForward(
                encoder, built.plan, built.shape, vocabulary, built.most_tokens, has_window=False
            )
            inputs = sample_ids(vocabulary, _TOKENS)
        else:
            plan, built = plan_layers(encoder.config, list(encoder.layers), quantized)
            forward, inputs = EncoderLayersForward(encoder, [plan]), _features(encoder)
        if not is_close(forward(inputs).last_hidden_state, encoder(inputs).last_hidden_state):
            raise CaptureError("it does more than to run its layers one after the other")
    except CaptureError as error:
        notes.append(f"{kind} runs by its modules: {error}")
        return None
    notes += built.notes
    ops.update(op_counts(built.graph))
    return forward


def _features(encoder: Any) -> Tensor:
    """Returns features of noise for an encoder of audio.

    Raises:
        CaptureError: their size is not known.
    """
    bins, positions = (
        getattr(encoder.config, name, None) for name in ("num_mel_bins", "max_source_positions")
    )
    if encoder.main_input_name != "input_features" or bins is None or positions is None:
        raise CaptureError("its inputs are no token ids, and no features of a known size")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, bins, 2 * positions, generator=generator).to(encoder.dtype)
