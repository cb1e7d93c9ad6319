"""Kinds of models that can be patched."""

from __future__ import annotations

import inspect
from typing import Any

from torch_armllm.hf.base_model import base_model_of


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
