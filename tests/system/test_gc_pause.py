"""The garbage collector is enabled again after the block."""

from __future__ import annotations

import gc

import pytest

from torch_armllm.system.gc_pause import collection_paused


def test_collection_is_disabled_within_the_block_only() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_error_enables_collection_again() -> None:
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()
