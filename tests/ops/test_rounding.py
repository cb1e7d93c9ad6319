"""`search_steps` against its reference, on every variant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_armllm.ops import variants
from torch_armllm.ops.rounding import reference_search_steps, search_steps
from torch_armllm.ops.rounding.reference import squared_errors

RUNNABLE = variants.machine().distinct("rounding")


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 3),
    groups=st.integers(0, 4),
    size=st.sampled_from((1, 7, 16, 32, 33, 64)),
    candidates=st.integers(0, 9),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_errors_are_least(
    rows: int, groups: int, size: int, candidates: int, weighted: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, groups, size, generator=random)
    steps = 0.05 + torch.rand(candidates, rows, groups, generator=random)
    zeros = torch.randint(0, 16, steps.shape, generator=random).float()
    factors = torch.rand(groups, size, generator=random) if weighted else None
    call = (values, steps, zeros, factors, 0, 15)
    expected = reference_search_steps(*call)
    errors = squared_errors(*call)
    for name in RUNNABLE:
        with variants.use(name):
            found = search_steps(*call)
        assert found.dtype == torch.int32 and found.shape == expected.shape
        if not candidates or not found.numel():
            assert torch.equal(found, expected)
            continue
        # float32 may choose another of two candidates that are as good
        least = errors.gather(0, expected.long()[None])
        assert torch.all(errors.gather(0, found.long()[None]) <= least * (1 + 1e-5))


def test_first_of_equal_candidates_is_chosen() -> None:
    values = torch.tensor([[[-8.0, 7.0, 3.0, 0.4]]])
    steps = torch.tensor([0.5, 1.0, 1.0])[:, None, None]
    for name in RUNNABLE:
        with variants.use(name):
            assert search_steps(values, steps, torch.zeros(3, 1, 1), None, -8, 7).item() == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_groups_without_a_finite_error_have_no_choice(value: float) -> None:
    values = torch.ones(1, 2, 16)
    values[0, 1, 3] = value
    for name in RUNNABLE:
        with variants.use(name):
            found = search_steps(values, torch.ones(2, 1, 2), torch.zeros(2, 1, 2), None, -8, 7)
        assert found.tolist() == [[0, -1]]
