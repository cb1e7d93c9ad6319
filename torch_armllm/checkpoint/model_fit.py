"""Checks that the tensors of a checkpoint fit a model, by their headers, before a byte of them is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.tensor_headers import FLOATS, INTEGERS, TensorHeader

_INTEGERS = {
    torch.uint8: ("U8",),
    torch.int8: ("I8",),
    torch.int32: ("I32",),
    torch.int64: ("I64", "I32"),
    torch.bool: ("BOOL", "U8"),
}


def check_fit(headers: Mapping[str, TensorHeader], model: Any) -> None:
    """Compares names, shapes and dtypes of stored tensors with those of a model on the meta device.

    A tensor that transformers merges with others is compared once it is merged.

    Args:
        headers: of the stored tensors.
        model: the model.

    Raises:
        ValueError: a tensor has another shape or dtype than in the model.
    """
    names = ModelNames(model)
    for key, header in headers.items():
        targets, converted = names.of(key)
        for target in targets:
            expected = names.state.get(target)
            if expected is not None:
                _check_dtype(key, header, expected)
                if not converted:
                    _check_shape(key, header, expected)


def unread_tensors(headers: Mapping[str, TensorHeader], model: Any, names: ModelNames) -> list[str]:
    """Returns the stored tensors that the model does not have, by their names in the files.

    Those that transformers knows to be of no use are left out.
    """
    ignored = [re.compile(pattern) for pattern in _ignored_patterns(model)]
    unread = []
    for key in headers:
        unknown = [target for target in names.of(key)[0] if target not in names.state]
        if unknown and not any(one.search(name) for one in ignored for name in (key, *unknown)):
            unread.append(key)
    return unread


def _ignored_patterns(model: Any) -> set[str]:
    """Returns patterns of tensors that models do without, as transformers' loader has them."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _check_shape(key: str, header: TensorHeader, expected: Tensor) -> None:
    if header.shape != tuple(expected.shape):
        raise ValueError(
            f"{key} has the shape {header.shape} in {header.file} and {tuple(expected.shape)} in the model: "
            "config.json belongs to another checkpoint"
        )


def _check_dtype(key: str, header: TensorHeader, expected: Tensor) -> None:
    wanted = (
        (*FLOATS, INTEGERS)
        if expected.is_floating_point()
        else _INTEGERS.get(expected.dtype, (header.dtype,))
    )
    if header.dtype not in wanted:
        raise ValueError(
            f"{key} is {header.dtype} in {header.file}, and {' or '.join(wanted[:4])} is expected: the file "
            "is damaged, or in a format that config.json does not name"
        )
