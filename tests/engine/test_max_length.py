"""The maximum length of sequences: limits of the model and of its plan."""

from __future__ import annotations

import pytest

from tests.support.models import tiny
from torch_armllm.engine.assembly.model_facts import resolve_max_model_len
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.patching.patched_model import positions_of


def test_smallest_limit_applies() -> None:
    model = tiny("llama")
    made_for = model.config.max_position_embeddings
    positions = positions_of(kind_of(model))
    assert resolve_max_model_len(None, *positions, None) == made_for
    assert resolve_max_model_len(None, *positions, 64) == 64
    assert resolve_max_model_len(32, *positions, 64) == 32


@pytest.mark.parametrize(
    ("wanted", "message"), [(65, "at most 64"), (1, "at least 2"), (10**6, "request fewer")]
)
def test_invalid_max_model_len_raises(wanted: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_max_model_len(wanted, *positions_of(kind_of(tiny("llama"))), 64)
