"""Encoders of text, and models of an encoder and a decoder, that the installed transformers has."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_armllm.hf.model_kind import is_encoder_decoder
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config

ENCODER = "encoder"
ENCODER_DECODER = "encoder and decoder"


def stack_families() -> dict[str, str]:
    """Returns `ENCODER` or `ENCODER_DECODER` by model type.

    Encoders are those that predict masked tokens.
    """
    from transformers.models.auto import modeling_auto as auto

    generating = {
        **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    kinds = {family: ENCODER_DECODER for family in sorted(generating) if _has_decoder(family)}
    masked = sorted(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return kinds | {family: ENCODER for family in masked if not _has_decoder(family)}


def _has_decoder(family: str) -> bool:
    from transformers import CONFIG_MAPPING

    with contextlib.suppress(Exception):  # no configuration without arguments
        return is_encoder_decoder(CONFIG_MAPPING[family]())
    return False


def tiny_stacks(family: str, **overrides: Any) -> Any:
    """Returns a tiny random model of a family of `stack_families`, in evaluation mode.

    Args:
        family: a ``model_type``.
        overrides: configuration values.

    Raises:
        ValueError: the model would be large.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as texts

    if stack_families()[family] == ENCODER:
        return build_tiny(transformers.AutoModel, tiny_config(family, is_decoder=False, **overrides))
    of_texts = family in texts
    kind = transformers.AutoModelForSeq2SeqLM if of_texts else transformers.AutoModelForSpeechSeq2Seq
    return build_tiny(kind, tiny_config(family, **overrides))
