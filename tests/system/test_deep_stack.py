"""Calls on a thread with a large stack."""

from __future__ import annotations

import threading

import pytest

from torch_armllm.system.deep_stack import call_on_deep_stack


def test_result_and_error_reach_the_caller() -> None:
    before = threading.stack_size()
    assert call_on_deep_stack(lambda a, b: a + b, 2, 3) == 5
    with pytest.raises(ZeroDivisionError):
        call_on_deep_stack(lambda: 1 / 0)
    assert threading.stack_size() == before
