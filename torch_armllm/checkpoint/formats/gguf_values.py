"""Changes of llama.cpp's converters to a model's tensors, undone.

transformers undoes it for most architectures by a processor of arrays; those that it undoes elsewhere, or not
at all, have processors here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_armllm.checkpoint.formats.gguf_file import OWN
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight

Array = Any


class _Processed(NamedTuple):
    weights: Array


class Qwen35Values:
    """Undoes the changes to Qwen3.5's tensors.

    Norms hold ``w + 1``, ``ssm_a`` ``-exp(A_log)``, and the value heads of linear attention lie in the order
    of their place in a group first, where transformers' lie group after group.
    """

    _NORMS = ("attn_norm", "post_attention_norm", "output_norm", "attn_q_norm", "attn_k_norm")

    def __init__(self, config: dict[str, Any]) -> None:
        self._keys = int(config["linear_num_key_heads"])
        self._times = int(config["linear_num_value_heads"]) // self._keys
        self._size = int(config["linear_value_head_dim"])
        self._before = 2 * int(config["linear_key_head_dim"]) * self._keys

    def process(self, weights: Array, name: str) -> _Processed:
        """Returns a tensor's values as transformers holds them; rows are the first axis."""
        part = name.removeprefix("blk.").lstrip("0123456789").removeprefix(".")
        stem = part.removesuffix(".weight")
        if stem in self._NORMS:
            return _Processed(weights - 1)
        if part == "ssm_a":
            return _Processed(np.log(-weights)[self._order(1)])
        if part == "ssm_dt.bias" or stem in ("ssm_alpha", "ssm_beta"):
            return _Processed(weights[self._order(1)])
        if stem == "attn_gate":
            return _Processed(weights[self._order(self._size)])
        if stem in ("attn_qkv", "ssm_conv1d"):
            values = weights[self._before :][self._order(self._size)]
            whole = np.concatenate((weights[: self._before], values))
            return _Processed(np.expand_dims(whole, 1) if stem == "ssm_conv1d" else whole)
        if stem == "ffn_gate_inp_shexp" and weights.ndim == 1:
            return _Processed(np.expand_dims(weights, 0))
        return _Processed(weights)

    def columns(self, name: str) -> Array | None:
        """Returns the file's column for each column of transformers' weight; None if they are the same."""
        return self._order(self._size) if name.endswith(".ssm_out.weight") and self._times > 1 else None

    def _order(self, size: int) -> Array:
        places = np.arange(self._keys * self._times * size).reshape(self._times, self._keys, size)
        return places.swapaxes(0, 1).reshape(-1)


class FalconValues:
    """Brings the rows of queries, keys and values back to their groups, of one key and value head each."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._heads = int(config["num_attention_heads"])
        grouped = bool(config.get("new_decoder_architecture")) or not config.get("multi_query")
        self._groups = int(config.get("num_kv_heads") or self._heads) if grouped else 1

    def process(self, weights: Array, name: str) -> _Processed:
        """Returns a tensor's values as transformers holds them; rows are the first axis."""
        if ".attn_qkv." not in name or self._groups == 1:
            return _Processed(weights)
        each, rest = self._heads // self._groups, weights.shape[1:]
        heads = weights.reshape(self._heads + 2 * self._groups, -1, *rest)
        q = heads[: self._heads].reshape(self._groups, each, *heads.shape[1:])
        k, v = heads[self._heads :].reshape(2, self._groups, 1, *heads.shape[1:])
        return _Processed(np.concatenate((q, k, v), 1).reshape(weights.shape))


_OWN: dict[str, Any] = {"qwen35": Qwen35Values, "qwen35moe": Qwen35Values, "falcon": FalconValues}


class Values:
    """Undoes what a converter changed in the tensors of an architecture."""

    def __init__(self, architecture: str, config: dict[str, Any]) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        own = _OWN.get(architecture)
        kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor: Any = kind(config=config) if own is None else own(config)

    def floats(self, name: str, value: Tensor) -> Tensor:
        """Returns a tensor's floats as transformers holds them."""
        order = self._columns(name)
        value = value if order is None else value[:, order]
        if name.endswith(".ffn_gate_inp_shexp.weight"):  # one row, which some converters write as a vector
            value = value.flatten()
        return torch.from_numpy(np.require(self._processor.process(value.numpy(), name).weights, None, OWN))

    def integers(self, name: str, weight: IntegerWeight) -> IntegerWeight:
        """Returns a matrix of integers in transformers' order of rows and columns.

        Raises:
            ValueError: its rows and columns are exchanged, or its values are changed.
        """
        rows = weight.shape[-2]
        index = np.arange(rows)[:, None]
        changed = self._processor.process(index, name).weights
        if changed.shape[0] == 1 and rows != 1:
            weight = torch.transpose(weight, 0, 1)  # type: ignore[arg-type,assignment]
        else:
            permutation = torch.from_numpy(np.array(changed)[:, 0])
            if not torch.equal(permutation, torch.arange(rows)):
                weight = weight.rows(permutation)
        order = self._columns(name)
        return weight if order is None else IntegerWeight(weight.quantized, torch.argsort(order))

    def _columns(self, name: str) -> Tensor | None:
        columns = getattr(self._processor, "columns", None)
        order = None if columns is None else columns(name)
        return None if order is None else torch.from_numpy(order)
