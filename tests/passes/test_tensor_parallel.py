"""Plans that ranks share out, beside the plan of one; the ranks are threads here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.looped_models import looped
from tests.support.models import tiny
from tests.support.rank_plans import built
from tests.support.ranks import at_once, communicators
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.parallel.rank_group import HeadShares, RankGroup
from torch_armllm.passes.lib.head_owners import PLACED
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.sample_steps import sample_hidden
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.recipe import Recipe

BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "llama": ("llama", 2, BIASES, True),
    "uneven heads": (
        "llama",
        2,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
        True,
    ),
    "copied keys": ("llama", 4, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}, True),
    "three ranks": (
        "llama",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
        True,
    ),
    "groups shared out": (
        "llama",
        3,
        {"num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 160, **BIASES},
        True,
    ),
    "groups shared out, with sinks": (
        "gpt_oss",
        2,
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        True,
    ),
    "groups left whole": (
        "llama",
        3,
        {"num_attention_heads": 25, "num_key_value_heads": 5, "hidden_size": 200},
        True,
    ),
    "heads that do not divide": ("llama", 3, {}, True),
    "more ranks than heads": ("llama", 3, {"num_attention_heads": 2, "num_key_value_heads": 1}, False),
    "merged projections": ("phi3", 2, {}, True),
    "norms of heads": ("qwen3", 2, {}, True),
    "windows": ("gemma3_text", 2, {}, True),
    "experts": ("qwen3_moe", 2, {}, True),
    "sinks and clamped experts": ("gpt_oss", 2, {}, True),
    "one layer split into three": ("gpt2", 2, {}, True),
    "recurrent layers": ("qwen3_next", 2, {}, True),
    "weighed inputs": ("llama4_text", 2, {}, True),
}
"""Family, ranks, settings, and whether its heads of keys and values are shared out."""
SURVEYED = {
    ("deepseek_v3", 3): {},
    ("deepseek_v32", 2): {},
    ("kimi_linear", 3): {0: (3, 48), 1: (1, 16, 16)},
    ("nemotron_h", 3): {0: (3, 192), 1: (8, 16, 16)},
    ("granitemoehybrid", 2): {0: (3, 96), 1: (4, 16, 16)},
    ("qwen3_5_moe_text", 2): {0: (3, 64), 1: (2, 16, 16)},
    ("lfm2", 3): {0: (2, 16)},
    ("jamba", 2): {0: (3, 128), 1: (16, 64)},
    ("recurrent_gemma", 2): {0: (3, 32), 1: (1, 32)},
    ("zamba", 3): {0: (3, 128), 1: (16, 16)},
}
"""Families with latents and recurrent layers, ranks, and the sizes of the first rank's states."""


def check_ranks(
    model: Any, ranks: int, shared_bytes: int = 1 << 20, whole_experts: bool = False
) -> tuple[NativePlan, list[tuple[NativePlan, Shape, bool]]]:
    """Compares the ranks of a quantized model with a single process, whose plan it returns, and theirs."""
    quantize(model, Recipe(importance=False), progress=False)
    ids = torch.randint(3, 90, (1, 23), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(23)[None]
    whole, shape, _ = built(model, None)
    expected = sample_hidden(whole, shape, ids, positions)
    with communicators(ranks, 1 << 12, shared_bytes=shared_bytes) as (_, handles):
        groups = [RankGroup(r, ranks, handles[r], 32, whole_experts) for r in range(ranks)]
        parts = [built(model, group) for group in groups]
        assert all("gather_columns" in plan.opcodes for plan, _, _ in parts)

        def work(rank: int) -> Tensor:
            return sample_hidden(*parts[rank][:2], ids, positions)

        for hidden in at_once(ranks, work):
            assert torch.equal(hidden, expected)
    return whole, parts


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CASES),
        ("uneven heads", torch.bfloat16),
        ("experts", torch.bfloat16),
    ],
)
def test_ranks_have_the_bits_of_one(name: str, dtype: torch.dtype) -> None:
    family, ranks, settings, divides = CASES[name]
    whole, parts = check_ranks(tiny(family, dtype, **settings), ranks)
    assert all(part[2] is divides and part[0].opcodes[0] == "meet" for part in parts)
    weights = sum(c.nbytes for c in whole.program.constants if c.dtype == torch.uint8)
    most = max(sum(c.nbytes for c in p.program.constants if c.dtype == torch.uint8) for p, _, _ in parts)
    assert most < 0.75 * weights


@torch.no_grad()
def test_ranks_have_one_part_of_a_weight_that_runs_several_times() -> None:
    whole, parts = check_ranks(looped("code", loops=2), 2)
    packed = [
        [c for c in p.program.constants if c.dtype == torch.uint8] for p in (whole, *(x[0] for x in parts))
    ]
    everything, *ranks = (sum(c.nbytes for c in each) for each in packed)
    assert max(ranks) < 0.75 * everything
    assert {len(each) for each in packed} == {len(packed[0])}


@torch.no_grad()
@pytest.mark.parametrize(("family", "ranks"), SURVEYED)
def test_ranks_share_out_latent_heads_and_states(family: str, ranks: int) -> None:
    whole, parts = check_ranks(tiny_model(family), ranks)
    groups = parts[0][1].states.groups
    assert {i: group.sizes for i, group in enumerate(groups)} == SURVEYED[family, ranks]
    for opcode in ("mla_attention", "gated_delta_rule", "selective_scan", "causal_conv"):
        assert all(plan.opcodes.count(opcode) == whole.opcodes.count(opcode) for plan, _, _ in parts)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "ranks"), [("qwen3_moe", 2), ("qwen3_moe", 3), ("deepseek_v3", 2), ("deepseek_v3", 3)]
)
def test_ranks_with_whole_experts_have_the_bits_of_one(family: str, ranks: int) -> None:
    model = tiny_model(family) if family == "deepseek_v3" else tiny(family)
    if family == "deepseek_v3" and ranks == 3:  # all tokens have the same experts, and two ranks have none
        model.model.layers[1].mlp.gate.e_score_correction_bias[4:6] += 9
    whole, parts = check_ranks(model, ranks, whole_experts=True)
    experts = [_experts_of(part[0]) for part in parts]
    assert [sum(each) for each in zip(*experts, strict=True)] == _experts_of(whole)
    assert all(max(each) - min(each) <= 1 for each in zip(*experts, strict=True))


def _experts_of(plan: NativePlan) -> list[int]:
    """Returns the experts of each layer whose weights are in a plan."""
    return [c.shape[0] for c in plan.program.constants if c.dtype == torch.uint8 and c.dim() == 3]


@torch.no_grad()
def test_more_ranks_than_experts_are_refused() -> None:
    model = tiny("qwen3_moe", num_experts=2)
    quantize(model, Recipe(importance=False), progress=False)
    with (
        communicators(3) as (_, handles),
        pytest.raises(ValueError, match="2 experts, and there are 3 ranks: give tensor_parallel_size = 2"),
    ):
        built(model, RankGroup(0, 3, handles[0], whole_experts=True))


@pytest.mark.parametrize(
    ("heads", "ranks", "query", "key"),
    [
        ((8, 4), 2, [(0, 4), (4, 8)], [(0, 2), (2, 4)]),
        ((9, 3), 2, [(0, 3), (3, 9)], [(0, 1), (1, 3)]),
        ((25, 5), 3, [(0, 5), (5, 15), (15, 25)], [(0, 1), (1, 3), (3, 5)]),
        ((8, 2), 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
    ],
)
def test_shares_of_whole_groups(
    heads: tuple[int, int], ranks: int, query: list[tuple[int, int]], key: list[tuple[int, int]]
) -> None:
    shared = HeadShares.of(*heads, ranks)
    assert shared is not None
    assert [(h.start, h.stop) for h in shared.query] == query
    assert [(h.start, h.stop) for h in shared.key] == key


@pytest.mark.parametrize(
    ("heads", "ranks", "query", "key", "skipped"),
    [
        ((8, 4), 2, [(0, 4), (4, 8)], [(0, 2), (2, 4)], [None, None]),
        ((9, 3), 2, [(0, 4), (4, 9)], [(0, 2), (1, 3)], [0, 1]),
        ((10, 5), 3, [(0, 3), (3, 6), (6, 10)], [(0, 2), (1, 3), (3, 5)], [0, 1, None]),
        ((25, 5), 3, [(0, 5), (5, 15), (15, 25)], [(0, 1), (1, 3), (3, 5)], [None] * 3),
        ((8, 2), 3, [(0, 2), (2, 5), (5, 8)], [(0, 1), (0, 2), (1, 2)], [None, 2, None]),
    ],
)
def test_balanced_shares_of_query_heads(
    heads: tuple[int, int],
    ranks: int,
    query: list[tuple[int, int]],
    key: list[tuple[int, int]],
    skipped: list[int | None],
) -> None:
    shared = HeadShares.balanced(*heads, ranks)
    assert shared is not None
    assert [(h.start, h.stop) for h in shared.query] == query
    assert [(h.start, h.stop) for h in shared.key] == key
    assert [shared.skipped(rank) for rank in range(ranks)] == skipped


def test_heads_that_form_no_groups_are_not_shared_out() -> None:
    assert HeadShares.balanced(2, 1, 3) is None
    assert HeadShares.of(8, 2, 3) is None
    assert HeadShares.of(6, 2, 4) is None


def test_every_argument_of_attention_has_a_place_among_ranks() -> None:
    schema = torch.ops.armllm.paged_attention.default._schema
    kept_together = {argument.name for argument in schema.arguments} - PLACED
    assert kept_together == {"relative", "profiles", "biases"}
