"""Loading of pooling models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from torch_armllm.checkpoint.formats.registry import quantization_settings
from torch_armllm.checkpoint.load import is_third_party, load, load_tokenizer, resolve
from torch_armllm.checkpoint.model_config import read_config
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.checkpoint.pretrained import load_pretrained
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.hf.model_kind import ModelKind, kind_of
from torch_armllm.patching.patch import patch
from torch_armllm.patching.state import is_patched, why_not_captured
from torch_armllm.pooling.loaded_pooling import LoadedPooling
from torch_armllm.pooling.pooled_class import pooled_class
from torch_armllm.pooling.pooling_model import (
    Classifier,
    Embedder,
    PoolingModel,
    TokenClassifier,
    TokenScorer,
)
from torch_armllm.pooling.score_template import score_template_of
from torch_armllm.pooling.sentence_files import SentenceFiles, read_sentence_files
from torch_armllm.quant.auto import resolve_auto
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.inspection import is_packed
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.recipe import Recipe

logger = logging.getLogger(__name__)

_CAUSAL = "ForCausalLM"
_UNUSED = (r"^pooler\.",)
"""Weights that make no vector: files without them are many."""
_MODES = {"LAST": "lasttoken", "CLS": "cls", "MEAN": "mean", "MAX": "max"}
"""Pooling modes by vLLM's names."""


def load_pooling(request: ModelRequest, pooler_config: Mapping[str, Any] | None = None) -> LoadedPooling:
    """Loads a pooling model, and patches it.

    A causal language model is loaded without its head, and makes vectors; or it scores pairs of texts by
    tokens that its configuration names (``classifier_from_token``).

    Args:
        request: what to load.
        pooler_config: replaces what the files say: ``pooling_type`` (``LAST``, ``CLS``, ``MEAN``, ``MAX``)
            and ``normalize``.

    Raises:
        ValueError: the model cannot pool, or a file or an option says something that is not supported.
        OSError: the checkpoint is not found.
    """
    request.check_overrides()
    source, overrides = request.model, request.hf_overrides or {}
    name = resolve(source) if isinstance(source, str) else request.source
    own = None if request.skip_tokenizer_init else _tokenizer(request.tokenizer, name)
    files = _configured(read_sentence_files(name) if name else SentenceFiles(), pooler_config or {})
    rows: torch.Tensor | None = None
    if isinstance(source, str):
        if Path(name).is_file() and overrides:
            raise ValueError("hf_overrides replace fields of config.json, which a single file has not")
        model, rows = _load(name, request.dtype, own, overrides)
        has_plan = is_patched(model)
    else:
        model, has_plan = source, is_patched(source)
        if type(model).__name__.endswith(_CAUSAL):
            model = base_model_of(model)
    kind = kind_of(model)
    if not has_plan:
        _patch(kind, request.quantization, request.progress)
    pooled = _with_pooler(kind, rows, files)
    limits = [n for n in (_positions(kind), files.max_tokens) if n is not None]
    template = score_template_of(model.config)
    return LoadedPooling(pooled, own, files, min(limits, default=None), template)


def _load(
    path: str,
    dtype: str | torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    overrides: Mapping[str, Any],
) -> tuple[Any, torch.Tensor | None]:
    """Loads a model, and the rows of its head by which it scores; None: it does not."""
    config = None if Path(path).is_file() else read_config(path)
    for key, value in overrides.items():
        setattr(config, key, value)
    name = "ForCausalLM" if config is None else (config.architectures or [""])[0]
    tokens: Sequence[str] | None = getattr(config, "classifier_from_token", None)
    is_quantized = config is None or quantization_settings(config) is not None
    if is_quantized and not name.endswith(_CAUSAL) and is_third_party(path):
        raise ValueError(
            f"{path} was quantized by another tool, whose files are read for language models only, and this "
            f"is a {name}: name the original model"
        )
    loader = pooled_class(name).loader if tokens is None else "AutoModelForCausalLM"
    if is_quantized and name.endswith(_CAUSAL):
        model = load(path, dtype=dtype, fuse=False)  # its base model is patched
        model.config.update(dict(overrides))
    else:
        assert config is not None
        optional = _UNUSED if loader == "AutoModel" else ()
        model = load_pretrained(getattr(transformers, loader), path, config, dtype=dtype, optional=optional)
    model = model.eval()
    rows = None if tokens is None else _head_rows(model, tokens, tokenizer)
    if not type(model).__name__.endswith(_CAUSAL):
        return model, None
    base = base_model_of(model)
    base.config = model.config
    return base, rows


def _head_rows(model: Any, tokens: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> torch.Tensor:
    """Returns the rows of a head for the tokens of false and true, float32 ``(2, hidden)``."""
    if len(tokens) != 2 or tokenizer is None:
        raise ValueError(
            f"classifier_from_token is {tokens!r}; give the tokens for false and true, such as "
            '["no", "yes"], and a tokenizer'
        )
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    head = model.get_output_embeddings()
    if None in ids or head is None:
        raise ValueError(
            f"classifier_from_token is {tokens!r}, and the tokenizer or the head of {type(model).__name__} "
            "has no such tokens"
        )
    weight: torch.Tensor = head.dequantize() if isinstance(head, QuantLinear) else head.weight.detach()
    return weight[ids].float()


def _patch(kind: ModelKind, quantization: str | Recipe | None, progress: bool) -> None:
    """Patches a model; one that no plan can compute runs by its own modules, quantized."""
    model = kind.model
    try:
        kind.check()
    except ValueError as error:
        logger.warning("%s; it runs module by module", error)
        chosen = resolve_auto(quantization, predicts_tokens=False)
        if chosen is not None and not is_packed(model):
            quantize(model, chosen, progress=progress)
        return
    patch(model, quantization, progress=progress)
    if (reason := why_not_captured(model)) is not None:
        logger.warning("%s runs module by module: %s", kind.name, reason)


def _configured(files: SentenceFiles, pooler: Mapping[str, Any]) -> SentenceFiles:
    """Returns what the files say, with the user's choices in their place."""
    if unknown := set(pooler) - {"pooling_type", "normalize"}:
        raise ValueError(f"pooler_config has {sorted(unknown)[0]!r}; give pooling_type and normalize")
    changes: dict[str, Any] = {}
    if (kind := pooler.get("pooling_type")) is not None:
        if kind not in _MODES:
            raise ValueError(f"pooling_type is {kind!r}; give one of {', '.join(_MODES)}")
        changes["modes"] = (_MODES[kind],)
    if (normalize := pooler.get("normalize")) is not None:
        if not isinstance(normalize, bool):
            raise ValueError(f"normalize of pooler_config is {normalize!r}; give true or false")
        changes["normalize"] = normalize
    return replace(files, **changes)


def _with_pooler(kind: ModelKind, rows: torch.Tensor | None, files: SentenceFiles) -> PoolingModel:
    if rows is not None:
        return TokenScorer(kind, rows)
    makes = pooled_class(kind.name).makes
    if makes != "embed":
        return Classifier(kind) if makes == "classify" else TokenClassifier(kind)
    if kind.model.get_output_embeddings() is not None and not kind.is_bare:
        raise ValueError(
            f"{kind.name} has a head for tokens: load it with AutoModel to pool its hidden states"
        )
    is_encoder = any(getattr(module, "is_causal", True) is False for module in kind.model.modules())
    return Embedder(kind, files, "cls" if is_encoder else "lasttoken")


def _positions(kind: ModelKind) -> int | None:
    return None if kind.position_limit is None else kind.position_limit - kind.first_position


def _tokenizer(
    tokenizer: str | PreTrainedTokenizerBase | None, source: str
) -> PreTrainedTokenizerBase | None:
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    name = tokenizer or source
    return load_tokenizer(name) if name else None
