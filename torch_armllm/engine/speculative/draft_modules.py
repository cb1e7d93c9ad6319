"""Modules of draft layers: built from a family's own classes, quantized and captured as any model."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import torch_armllm.capture.markers.given_rows  # noqa: F401  (registers the op that reads hidden states)
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.plan.step import Plan
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.inspection import is_packed
from torch_armllm.quant.recipe import Recipe

logger = logging.getLogger(__name__)

_PER_LAYER = ("layer_types", "mlp_layer_types")
"""Lists of a configuration with an entry for each layer."""


class DraftBase(nn.Module):
    """The base model of a draft layer; capture makes a graph of it as of any model.

    Args:
        merge: from embeddings and given rows to the inputs of the layer.
        stack: a base model of the family with one layer.
        columns: columns of the given rows.
        dtype: of the given rows.

    Attributes:
        head_norm: norm before the head, if the step of the next token is given the hidden states before it.
            Each row then has both.
    """

    def __init__(self, merge: nn.Module, stack: Any, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = stack.config
        self.embedding: nn.Module = nn.Identity()
        self.merge = merge
        self.stack = stack
        self.columns, self.dtype = columns, dtype
        self.head_norm: nn.Module | None = None

    def get_input_embeddings(self) -> nn.Module:
        """Returns the model's embedding, which the layer shares."""
        return self.embedding

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False, **_: Any
    ) -> Any:
        """Computes hidden states ``(1, T, hidden)`` of ids ``(1, T)``."""
        given = torch.ops.armllm.given_rows(input_ids, self.columns, self.dtype)
        merged = self.merge(self.embedding(input_ids), given)
        output = self.stack(inputs_embeds=merged, position_ids=position_ids, use_cache=False)
        if self.head_norm is not None:
            hidden = output.last_hidden_state
            output.last_hidden_state = torch.cat([self.head_norm(hidden), hidden], -1)
        return output

    @property
    def columns_of_rows(self) -> tuple[range, range]:
        """Columns of a row that the head reads, and those that the step of the next token is given."""
        size = int(self.config.hidden_size)
        return range(size), range(size, 2 * size) if self.head_norm is not None else range(size)


class _Outer(nn.Module):
    """A model of a base model only: the head belongs to the model that drafts are for."""

    def __init__(self, base: DraftBase) -> None:
        super().__init__()
        self.base_model = base
        self.config = base.config


def one_layer(config: Any) -> Any:
    """Returns the configuration of a model with one layer, of the kind of the last one, and no vocabulary."""
    config = copy.deepcopy(config)
    for name in _PER_LAYER:
        if kinds := getattr(config, name, None):
            setattr(config, name, kinds[-1:])
    changes = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "vocab_size": 1,
        "pad_token_id": None,
    }
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def hidden_size_of(model: Any) -> int:
    """Returns the width of a model's hidden states."""
    return int(model.config.get_text_config().hidden_size)


def dtype_of(model: Any) -> torch.dtype:
    """Returns the dtype of a model's norms and hidden states."""
    parameters = base_model_of(model).parameters()
    found: torch.dtype = next(p.dtype for p in parameters if p.is_floating_point())
    return found


def quantize_like(model: Any, modules: nn.Module, head: str = "") -> None:
    """Quantizes the modules of a draft layer as the model that it serves, in place.

    Args:
        model: the patched model.
        modules: of the layer.
        head: name of the module that is a head, if there is one.
    """
    if not is_packed(model):
        return
    recipe = Recipe.of(model.config.quantization_config.recipe.scheme)
    overrides = {head: recipe.head} if head else {}
    quiet = replace(recipe, overrides=overrides, importance=False, allow_outliers=True)
    quantize(modules, quiet, progress=False)


def plan_of(base: DraftBase, model: Any, embedding: nn.Module | None = None) -> tuple[Plan, Shape]:
    """Returns the plan of a draft layer, and the shape of its KV cache.

    Args:
        base: the layer, quantized or not.
        model: that it drafts for.
        embedding: of the layer; None: the model's.

    Raises:
        CaptureError: it cannot be captured.
    """
    base.embedding = model.get_input_embeddings() if embedding is None else embedding
    base.eval()
    with torch.no_grad():
        built = build_plan(kind_of(_Outer(base)), is_packed(base), None)
    for note in built.notes:
        logger.warning("the draft layer of %s: %s", type(model).__name__, note)
    return built.plan, built.shape
