"""Installs the plans of a model of two stacks: an encoder, and a decoder that attends to its tokens."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.markers.encoder_states import with_encoder
from torch_armllm.patching.audio_encoder import AudioEncoderForward, EncoderLayers
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.decoder_forward import DecoderForward
from torch_armllm.patching.encoder_forward import EncoderForward
from torch_armllm.patching.forward import with_gradients_by_modules
from torch_armllm.patching.op_counts import op_counts
from torch_armllm.quant.inspection import is_packed
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.report import Report


def install_stacks(model: Any, report: Report) -> tuple[DecoderForward | None, nn.Module | None]:
    """Replaces the ``forward`` of a model's encoder and decoder by plans.

    Args:
        model: a model that generates with two stacks.
        report: gets the reasons of stacks that keep their modules, by name.

    Returns:
        The decoder's new ``forward``, None if it keeps its modules; and the encoder, None if it keeps its.
    """
    encoder, decoder = model.get_encoder(), model.get_decoder()
    ops: Counter[str] = Counter()
    forward: DecoderForward | None = None
    try:
        with with_encoder(decoder):
            built = build_plan(decoder, is_packed(model), None)
    except CaptureError as error:
        report.capture_reason = f"{type(decoder).__name__}: {error}"
        return None, None
    vocabulary = decoder.get_input_embeddings().num_embeddings
    forward = DecoderForward(decoder, built.plan, built.shape, vocabulary, built.most_tokens)
    report.notes += built.notes
    report.kv_bytes = built.shape.bytes_per_token
    ops.update(op_counts(built.graph))
    encoding = _encoder_forward(encoder, report, ops)
    model.forward = with_gradients_by_modules(model, *(f for f in (forward, encoding) if f is not None))
    decoder.forward = forward
    if encoding is not None:
        encoder.forward = encoding
    report.captured, report.ops = True, dict(ops)
    return forward, encoder if encoding is not None else None


def _encoder_forward(encoder: Any, report: Report, ops: Counter[str]) -> EncoderForward | None:
    """Returns the ``forward`` of an encoder's plan; None if it keeps its modules, which a note says."""
    kind = type(encoder).__name__
    takes_ids = "input_ids" in inspect.signature(encoder.forward).parameters
    try:
        if not takes_ids and not isinstance(getattr(encoder, "layers", None), nn.ModuleList):
            raise CaptureError("its inputs are no token ids, and it has no list of layers")
        stack: Any = encoder if takes_ids else EncoderLayers(encoder)
        built = build_plan(stack, any(isinstance(m, QuantLinear) for m in encoder.modules()), None)
        if not built.looks_ahead:
            raise CaptureError("its tokens do not attend to later ones")
        vocabulary = int(stack.get_input_embeddings().num_embeddings)
        made = EncoderForward if takes_ids else AudioEncoderForward
        forward = made(encoder, built.plan, built.shape, vocabulary, built.most_tokens, False)
        if isinstance(forward, AudioEncoderForward) and not forward.equals_modules(_features(encoder)):
            raise CaptureError("it does more than to run its layers one after the other")
    except CaptureError as error:
        report.notes.append(f"{kind} runs by its modules: {error}")
        return None
    report.notes += built.notes
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
