"""Checks that the tensors of a checkpoint fit a model, by their headers, before a byte of them is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.tensor_headers import FLOATS, INTEGERS, TensorHeader

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BLOCK = re.compile(r".*?\.\d+\.")
_INTEGERS = {
    torch.uint8: ("U8",),
    torch.int8: ("I8",),
    torch.int32: ("I32",),
    torch.int64: ("I64", "I32"),
    torch.bool: ("BOOL", "U8"),
}


def check_fit(headers: Mapping[str, TensorHeader], model: Any, saved: bool = False) -> list[str]:
    """Compares names, shapes and dtypes of stored tensors with those of a model on the meta device.

    A tensor that transformers merges with others is compared once it is merged.

    Args:
        headers: of the stored tensors.
        model: the model.
        saved: this package wrote the files, which then hold nothing that the model does not have.

    Returns:
        The stored biases of layers that have none in the model: they may be ignored if they are 0.

    Raises:
        ValueError: a tensor has another shape or dtype than in the model, or belongs to a layer that the
            model does not have.
    """
    names = ModelNames(model)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    patterns = {_NUMBER.sub("#", name) for name in names.state}
    biases = []
    for key, header in headers.items():
        targets, converted = names.of(key)
        for target in targets:
            expected = names.state.get(target)
            if expected is not None:
                _check_dtype(key, header, expected)
                if not converted:
                    _check_shape(key, header, expected)
            elif saved or _NUMBER.sub("#", target) in patterns:
                if not any(one.search(target) or one.search(key) for one in ignored):
                    raise ValueError(_unexpected(key, header, target, model))
            elif target.endswith(".bias") and f"{target.removesuffix('bias')}weight" in names.state:
                biases.append(key)
    return biases


def _unexpected(key: str, header: TensorHeader, target: str, model: Any) -> str:
    block = _BLOCK.match(target)
    return (
        f"{header.file} holds {key}, and {type(model).__name__} has no "
        f"{block.group().rstrip('.') if block else target}: config.json belongs to another checkpoint, or "
        "names fewer layers or experts than there are"
    )


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
