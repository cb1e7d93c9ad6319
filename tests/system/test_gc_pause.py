"""Python looks for garbage again when imports are through."""

from __future__ import annotations

import gc

import pytest

from torch_armllm.system.gc_pause import collection_paused


def test_only_the_block_goes_without() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_in_the_block() -> None:
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()
