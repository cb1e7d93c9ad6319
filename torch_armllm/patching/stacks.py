"""Installs the plans of a model of two stacks: an encoder, and a decoder that attends to its tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.sample import sample_ids
from torch_armllm.capture.step_inputs import step_arguments
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.hf.replacements import Replacements
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.forwards.attending_calls import AttendingCalls
from torch_armllm.patching.forwards.encoder_layers import plan_layers
from torch_armllm.patching.forwards.forward import PatchedForward, with_gradients_by_modules
from torch_armllm.patching.forwards.layer_calls import LayerCalls, is_close
from torch_armllm.patching.forwards.text_calls import TextCalls
from torch_armllm.patching.install import Installed, op_counts
from torch_armllm.quant.inspection import is_packed
from torch_armllm.quant.modules.linear import QuantLinear

_TOKENS = 14


def install_stacks(kind: ModelKind, replaced: Replacements) -> Installed:
    """Replaces the ``forward`` of a model's encoder and decoder by plans.

    Args:
        kind: of a model that generates with two stacks.
        replaced: gets what is replaced.

    Returns:
        What is installed; a note says why an encoder keeps its modules.

    Raises:
        CaptureError: the decoder keeps its modules.
    """
    model, encoder, decoder = kind.model, kind.model.get_encoder(), kind.model.get_decoder()
    ops: Counter[str] = Counter()
    notes: list[str] = []
    if encoder is model or decoder is model or not hasattr(decoder, "config"):
        raise CaptureError(f"{kind.name} has no encoder and decoder that are models themselves")
    try:
        forward, rounding = _decoder_forward(kind.decoder, is_packed(model), notes, ops)
    except CaptureError as error:
        raise CaptureError(f"{kind.decoder.name}: {error}") from error
    encoding = _encoder_forward(kind.encoder, notes, ops)
    by_plans = with_gradients_by_modules(model, *(f for f in (forward, encoding) if f is not None))
    replaced.put(decoder, "forward", forward)
    replaced.put(model, "forward", by_plans)
    if encoding is not None:
        replaced.put(encoder, "forward", encoding)
    kv_bytes = forward.shape.bytes_per_token
    return Installed(kind, forward, rounding, dict(ops), kv_bytes, notes=notes, encoder=encoding)


def _decoder_forward(
    kind: ModelKind, quantized: bool, notes: list[str], ops: Counter[str]
) -> tuple[PatchedForward[AttendingCalls], float]:
    """Returns the ``forward`` of a decoder's plan, and the error of its hidden states that is known.

    Raises:
        CaptureError: it has none, or computes something else.
    """
    built = build_plan(kind, quantized, None)
    if built.looks_ahead:
        raise CaptureError("its tokens attend to later ones")
    forward = PatchedForward(AttendingCalls(kind, built.plan, built.shape, built.most_tokens))
    ids = sample_ids(kind.vocab_size, _TOKENS).expand(2, -1)
    states = step_arguments(kind, ids)["encoder_hidden_states"]
    arguments = {"encoder_hidden_states": torch.cat([states, states.flip(1)]), "use_cache": False}
    expected = kind.model(input_ids=ids, **arguments).last_hidden_state
    if not is_close(forward(input_ids=ids, **arguments).last_hidden_state, expected):
        raise CaptureError("it computes something else from its own cache than from its modules'")
    notes += built.notes
    ops.update(op_counts(built.graph))
    return forward, built.rounding


def _encoder_forward(
    kind: ModelKind, notes: list[str], ops: Counter[str]
) -> PatchedForward[TextCalls] | PatchedForward[LayerCalls] | None:
    """Returns the ``forward`` of an encoder's plan; None if it keeps its modules, which a note says."""
    encoder = kind.model
    try:
        if not kind.takes_ids and not isinstance(getattr(encoder, "layers", None), nn.ModuleList):
            raise CaptureError("its inputs are no token ids, and it has no list of layers")
        quantized = any(isinstance(m, QuantLinear) for m in encoder.modules())
        forward: PatchedForward[TextCalls] | PatchedForward[LayerCalls]
        if kind.takes_ids:
            built = build_plan(kind, quantized, None)
            if not built.looks_ahead:
                raise CaptureError("its tokens do not attend to later ones")
            calls = TextCalls(kind, built.plan, built.shape, built.most_tokens, has_window=False)
            forward, inputs = PatchedForward(calls), sample_ids(kind.vocab_size, _TOKENS)
        else:
            plan, built = plan_layers(encoder.config, list(encoder.layers), quantized)
            forward, inputs = PatchedForward(LayerCalls(encoder, [plan])), _features(encoder)
        if not is_close(forward(inputs).last_hidden_state, encoder(inputs).last_hidden_state):
            raise CaptureError("it does more than to run its layers one after the other")
    except CaptureError as error:
        notes.append(f"{kind.name} runs by its modules: {error}")
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
