"""Plans with adapters that ranks share out, beside the plan of one; the ranks are threads here."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import tiny
from tests.support.rank_plans import built_with_slots
from tests.support.ranks import at_once, communicators
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.lora.slot_set import SlotSet
from torch_armllm.lora.slots import AdapterSlots, LoraSlots, add_slots
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.sample_steps import sample_hidden
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.recipe import Recipe

TOKENS = 23
CASES: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "three ranks": (
        "llama",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192, "intermediate_size": 336},
        4,
    ),
    "small heads": (
        "llama",
        2,
        {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 16},
        5,
    ),
    "merged projections": ("phi3", 2, {"hidden_size": 256, "intermediate_size": 320}, 4),
    "experts": ("qwen3_moe", 2, {"hidden_size": 256, "head_dim": 64}, 3),
    "recurrent layers": ("qwen3_next", 2, {"hidden_size": 256}, 5),
}
"""Family, ranks, settings, and most exchanges of a layer."""


def _write(slots: SlotSet) -> None:
    """Writes two random adapters to the slots of a rank, and gives them to rows in turn with none."""
    generator = torch.Generator().manual_seed(7)
    for name, layer in slots.layers.items():
        if not isinstance(layer, LoraSlots):
            continue
        for slot, rank in ((0, 5), (1, 8)):
            a = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
            b = torch.randn(rank, layer.out_features, generator=generator)
            slots.write(slot, name, layer.prepare(a, b))
    slots.rows[:TOKENS] = torch.tensor([-1, 0, 1] * 8)[:TOKENS]


def _hidden(plan: NativePlan, shape: Shape) -> Tensor:
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    return sample_hidden(plan, shape, ids, torch.arange(TOKENS)[None])


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_ranks_with_adapters_have_the_bits_of_one(name: str) -> None:
    family, ranks, settings, exchanges = CASES[name]
    model = tiny(family, torch.bfloat16, **settings)
    quantize(model, Recipe(importance=False), progress=False)
    one = deepcopy(model)
    add_slots(one, AdapterSlots(2, 8, 32))
    plan, shape, slots = built_with_slots(one, None)
    without = _hidden(plan, shape)
    _write(slots)
    expected = _hidden(plan, shape)
    assert (
        torch.equal(expected[0], without[0]) and not torch.isclose(expected[1:3], without[1:3]).all(1).any()
    )
    with communicators(ranks, 1 << 12, shared_bytes=1 << 20) as (_, handles):
        parts = []
        for rank in range(ranks):
            own = deepcopy(model)
            add_slots(own, AdapterSlots(2, 8, 32, ranks=ranks))
            parts.append(built_with_slots(own, RankGroup(rank, ranks, handles[rank], 32)))
            _write(parts[-1][2])

        def work(rank: int) -> Tensor:
            return _hidden(*parts[rank][:2])

        for hidden in at_once(ranks, work):
            assert torch.equal(hidden, expected)
    assert all(part[0].opcodes == parts[0][0].opcodes for part in parts)
    weights, *of_ranks = (
        sum(c.nbytes for c in each.program.constants if c.dtype == torch.uint8)
        for each in (plan, *(part[0] for part in parts))
    )
    assert max(of_ranks) < 0.8 * weights
    count = parts[0][0].opcodes.count("gather_columns")
    assert count <= exchanges * model.config.num_hidden_layers
