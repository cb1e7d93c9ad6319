"""Heads that a checkpoint stores although its configuration ties them to the embedding."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.empty_model import empty_model
from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.tensor_headers import TensorHeader, read_headers, read_tensor
from torch_armllm.checkpoint.weight_files import weight_files
from torch_armllm.hf.output_layer import output_layer_of

logger = logging.getLogger(__name__)

_TIE = "tie_word_embeddings"


def untie_own_head(kind: Any, source: str, config: PreTrainedConfig) -> None:
    """Unties head and embedding in a configuration if the files hold both and they differ.

    transformers computes with both then, but its configuration still calls them tied, which a quantized
    folder would be loaded by.  A head that another tool quantized is always one of its own.

    Args:
        kind: the class, or auto class, of the model.
        source: a folder or hub name.
        config: its configuration; changed in place, with a warning.

    Raises:
        ValueError: a file is damaged.
    """
    text = config.get_text_config(decoder=True)
    if not (getattr(config, _TIE, False) or getattr(text, _TIE, False)):
        return
    headers = read_headers(weight_files(source))
    vocabulary = getattr(text, "vocab_size", None)
    if sum(vocabulary in header.shape and len(header.shape) > 1 for header in headers.values()) < 2:
        return
    head = _own_head(empty_model(kind, config, source), headers)
    if head is not None:
        logger.warning(
            "%s holds %s, which is another tensor than the embedding, though its config.json says "
            "tie_word_embeddings: the head's own weight is used; set tie_word_embeddings to false there",
            *(source, head),
        )
        for part in (config, text):
            if getattr(part, _TIE, False):
                setattr(part, _TIE, False)


def _own_head(model: Any, headers: Mapping[str, TensorHeader]) -> str | None:
    """Returns the name of the stored head if it is not the embedding."""
    names = ModelNames(model)
    stored = {target: key for key in headers for target in names.of(key)[0]}
    embedding, head = model.get_input_embeddings(), output_layer_of(model)
    if embedding is None or head is None or embedding.weight is not head.weight:
        return None  # the class does not tie them
    places = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    one, other = f"{places[id(embedding)]}.weight", f"{places[id(head)]}.weight"
    packed = f"{places[id(head)]}."
    for target, key in stored.items():
        if target.startswith(packed) and target != other and not target.endswith(".bias"):
            return key
    if one not in stored or other not in stored:
        return None
    first, second = (read_tensor(headers[stored[name]], stored[name]) for name in (one, other))
    return None if torch.equal(first, second) else stored[other]
