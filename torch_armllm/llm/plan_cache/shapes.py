"""Shapes of KV caches and states as JSON types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from torch_armllm.kv_cache.shapes import CacheShape, LatentShape, MixedShape, Shape, StatesOnlyShape
from torch_armllm.kv_cache.states import StateGroup, StateShape
from torch_armllm.system.dtypes import dtype_name

_KINDS = {kind.__name__: kind for kind in (CacheShape, LatentShape, StatesOnlyShape)}


def describe_shape(shape: Shape) -> dict[str, Any]:
    """Returns the fields of a shape as JSON types, for `shape_of`."""
    states = [_with_names(asdict(group)) for group in shape.states.groups]
    if isinstance(shape, MixedShape):
        return {
            "places": [list(p) for p in shape.positions],
            "groups": [describe_shape(g) for g in shape.groups],
            "states": states,
        }
    return {"kind": type(shape).__name__, **_with_names(asdict(shape)), "states": states}


def shape_of(fields: dict[str, Any]) -> Any:
    """Returns the shape that `describe_shape` described."""
    groups = [_with_dtypes(group) for group in fields["states"]]
    states = StateShape(tuple(StateGroup(**{**group, "sizes": tuple(group["sizes"])}) for group in groups))
    if "groups" in fields:
        parts = tuple(shape_of(group) for group in fields["groups"])
        return MixedShape(parts, tuple((a, b) for a, b in fields["places"]), states)
    known = {**_with_dtypes(fields), "states": states}
    return _KINDS[known.pop("kind")](**known)


def _with_names(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in fields.items()}


def _with_dtypes(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: getattr(torch, v) if k.endswith("dtype") else v for k, v in fields.items()}
