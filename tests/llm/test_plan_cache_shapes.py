"""Shapes of caches survive the plan cache, every field of every kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from torch_armllm.kv_cache.shapes import CacheShape, LatentShape, MixedShape, StatesOnlyShape
from torch_armllm.kv_cache.states import StateGroup, StateShape
from torch_armllm.llm.plan_cache.shapes import describe_shape, shape_of

STATES = StateShape(
    (StateGroup(3, (4, 16, 8), torch.float32, True), StateGroup(2, (3, 40), torch.bfloat16, False))
)
KEYS = CacheShape(2, 4, 64, 32, torch.int8, 64, 2, 16, torch.bfloat16, STATES)
LATENTS = LatentShape(5, 512, 64, torch.bfloat16, 16, 4096, 1, 128, torch.bfloat16, STATES)
SHAPES = [
    KEYS,
    CacheShape(1, 1, 8, 8, torch.float16),
    LATENTS,
    StatesOnlyShape(torch.float16, 32, STATES),
    MixedShape((KEYS, CacheShape(1, 2, 8, 8, torch.int8)), ((0, 0), (1, 0), (0, 1)), STATES),
    MixedShape((LatentShape(1, 16, 8, torch.float32), LATENTS), ((1, 3), (0, 0))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_a_described_shape_is_the_same_again(shape: Any) -> None:
    assert shape_of(json.loads(json.dumps(describe_shape(shape)))) == shape
