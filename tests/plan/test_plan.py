"""Native plans reject inputs that would cause reads out of bounds."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.support.models import token_ids
from tests.support.patched_models import patched
from torch_armllm.plan.native import NativePlan


def run(inputs: list[Tensor], tokens: int) -> None:
    """Runs the native plan of a tiny Llama."""
    plan = patched("llama").base_model.forward.plan
    assert isinstance(plan, NativePlan)
    plan._run(plan._handle, inputs, tokens)


@pytest.mark.parametrize("token_id", [-1, 97, 10**9])
def test_token_outside_vocabulary_raises(token_id: int) -> None:
    ids = token_ids(1, 6)
    ids[0, 4] = token_id
    with pytest.raises(RuntimeError, match=f"token 4 has id {token_id}, but the vocabulary is 0 to 96"):
        run([ids], 6)


def test_missing_or_short_inputs_raise() -> None:
    with pytest.raises(RuntimeError, match="input 0 has 6 elements for 7 tokens"):
        run([token_ids(1, 6)], 7)
    with pytest.raises(RuntimeError, match="it reads input 1, but the number of inputs is 1"):
        run([token_ids(1, 6)], 6)


def test_inputs_of_another_dtype_raise() -> None:
    with pytest.raises(RuntimeError, match="input 0 has another dtype than the program reads"):
        run([token_ids(1, 6).int()], 6)
