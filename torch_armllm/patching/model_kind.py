"""Kinds of models that can be patched, and a check of those that predict no tokens."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from torch_armllm.capture.sample import sample_ids
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.patching.forward import PatchedForward

_TOKENS = 14
_LARGEST_DIFFERENCE = 0.2
"""Of results by a plan and by modules; hidden states were compared before, to the bounds of rounding."""


def has_two_stacks(model: Any) -> bool:
    """True if a model generates with a decoder that attends to an encoder's tokens."""
    return bool(getattr(model.config, "is_encoder_decoder", False) and model.can_generate())


def predicts_tokens(model: Any) -> bool:
    """True if a model predicts next tokens; False for encoders, bare decoders and what is made of them."""
    if has_two_stacks(model):
        return False
    has_head = model.get_output_embeddings() is not None and base_model_of(model) is not model
    return has_head and bool(model.can_generate())


def check_kind(model: Any) -> None:
    """Raises ValueError unless a model predicts tokens, or is made of one decoder or encoder of text.

    Models of an encoder and a decoder have to generate.
    """
    kind = type(model).__name__
    if predicts_tokens(model) or has_two_stacks(model):
        return
    takes_ids = "input_ids" in inspect.signature(model.forward).parameters
    if getattr(model.config, "is_encoder_decoder", False) or not takes_ids:
        raise ValueError(
            f"{kind} is neither a causal language model nor a decoder or encoder of text, nor made of one: "
            "load it with AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModel, "
            "AutoModelForSequenceClassification, "
            "…ForTokenClassification or, of an encoder, …ForMaskedLM"
        )


def results_of(model: Any) -> dict[str, Tensor]:
    """Returns what a model computes of a few tokens, by the names of its output."""
    ids = sample_ids(model.get_input_embeddings().num_embeddings, _TOKENS)
    out = model(input_ids=ids, use_cache=False)
    return {name: value.float() for name, value in out.items() if isinstance(value, Tensor)}


def misuse(model: Any, forward: PatchedForward, expected: dict[str, Tensor] | None) -> str | None:
    """Returns the reason why a model cannot use the hidden states of a plan; None if it can.

    Models without a head for tokens, whose results are ``expected``, may read anything that their base model
    returns.
    """
    kind, inner = type(model).__name__, type(forward.base).__name__
    if not forward.is_called_by(model):
        return f"the forward of {kind} calls parts of its {inner} itself, and so would not call a plan"
    if expected is None:
        return None
    try:
        found = results_of(model)
    except Exception as error:  # noqa: BLE001 - it may fail in any way where a result is missing
        return f"{kind} reads more than the last hidden states of its {inner}: {error}"
    for name, value in expected.items():
        if name not in found:
            return f"{kind} returns {name}, which no plan computes"
        if not float((found[name] - value).norm()) <= _LARGEST_DIFFERENCE * float(value.norm()):
            return f"{kind} computes another {name} from the last hidden states of its {inner}"
    return None
