"""Expert routing against its reference, on every variant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import moe, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
RUNNABLE = variants.machine().distinct("moe")


def run_all_variants(logits: Tensor, *args: Any, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns weights and expert ids of every variant."""
    actual = []
    for name in RUNNABLE:
        with variants.use(name):
            actual.append(moe.moe_route(logits, *args, **options))
    return actual


def check(logits: Tensor, *args: Any, **options: Any) -> None:
    """Asserts that every variant matches the reference, and that all have the same bits."""
    actual = run_all_variants(logits, *args, **options)
    weights, ids = moe.reference_moe_route(logits, *args, **options)
    assert torch.equal(actual[0][1], ids)
    torch.testing.assert_close(actual[0][0], weights, rtol=3e-6, atol=1e-7)
    for other in actual[1:]:
        assert torch.equal(other[0], actual[0][0])
        assert torch.equal(other[1], actual[0][1])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_matches_reference(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    groups = data.draw(st.sampled_from((1, 1, 2, 4)))
    size = data.draw(st.integers(1, 70))
    top_k_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(size * top_k_groups, 12)))
    scoring = data.draw(st.sampled_from(moe.SCORINGS))
    # Coarse logits tie often.  A bias comes with continuous logits, as rounding of sums could break ties.
    logits = torch.randint(-8, 8, (data.draw(st.integers(0, 5)), groups * size)) / 2
    bias = None
    if data.draw(st.booleans()):
        logits, bias = torch.randn_like(logits), torch.randn(groups * size)
    check(
        logits.to(data.draw(st.sampled_from(FLOATS))),
        top_k,
        scoring,
        data.draw(st.booleans()),
        data.draw(st.sampled_from((1.0, 2.5))),
        correction_bias=bias,
        groups=groups,
        top_k_groups=top_k_groups,
        epsilon=data.draw(st.sampled_from((1e-20, 1e-6, 1e-2))),
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_table_names_the_experts_of_token_ids(scoring: str, renormalize: bool, tokens: int) -> None:
    table = torch.stack([torch.randperm(12)[:3] for _ in range(5)]).to(torch.int32)
    ids = torch.tensor([3, -9, 4, 0, 99, 3, 1])[:tokens]  # also ids outside of the table
    check(torch.randn(tokens, 12), 3, scoring, renormalize, 1.5, token_ids=ids, choices=table)
    chosen = moe.moe_route(torch.randn(tokens, 12), 3, scoring, False, token_ids=ids, choices=table)[1]
    assert torch.equal(chosen, table[ids.clamp(0, 4)])


@pytest.mark.parametrize(
    ("experts", "top_k", "options"),
    [
        (8, 2, {"scoring": "softmax", "renormalize": True}),
        (128, 8, {"scoring": "softmax", "renormalize": True}),
        (64, 8, {"scoring": "softmax", "renormalize": False}),
        (32, 4, {"scoring": "topk_softmax", "renormalize": False}),
        (256, 8, {"scoring": "sigmoid", "renormalize": True, "scale": 2.5, "groups": 8, "top_k_groups": 4}),
        (160, 6, {"scoring": "softmax", "renormalize": False, "scale": 16.0, "groups": 8, "top_k_groups": 3}),
    ],
    ids=["mixtral", "qwen3", "olmoe", "gpt-oss", "deepseek-v3", "deepseek-v2"],
)
def test_routers_of_real_models_match_reference(experts: int, top_k: int, options: dict[str, Any]) -> None:
    logits = torch.randn(20, experts) * 2
    if options["scoring"] == "sigmoid":
        options = {**options, "correction_bias": torch.randn(experts) / 10}
    check(logits, top_k, **options)


def test_more_than_1024_experts_are_refused() -> None:
    with pytest.raises(RuntimeError, match="at most|1 to 1024"):
        moe.moe_route(torch.randn(1, 2000), 2, "softmax", True)


def test_equal_scores_select_the_lower_index() -> None:
    logits = torch.zeros(2, 40)
    logits[1, 33] = 1.0
    for scoring in moe.SCORINGS:
        for _, ids in run_all_variants(logits, 3, scoring, True):
            assert ids.tolist() == [[0, 1, 2], [33, 0, 1]]


@pytest.mark.parametrize("scoring", moe.SCORINGS)
@pytest.mark.parametrize("groups", [1, 4])
def test_non_finite_logits_return_distinct_ids_in_range(scoring: str, groups: int) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.randn(6, 16)
    logits[0] = nan
    logits[1, ::2] = nan
    logits[2] = -inf
    logits[3] = inf
    logits[4, 3], logits[4, 9] = inf, -inf
    for _, ids in run_all_variants(logits, 6, scoring, True, groups=groups, top_k_groups=min(groups, 2)):
        for row in ids.tolist():
            assert len(set(row)) == 6
            assert all(0 <= i < 16 for i in row)
        if groups == 1:
            assert ids[1].tolist() == torch.argsort(logits[1].nan_to_num(-99.0), descending=True)[:6].tolist()
