"""Tables that the compiled library describes itself by."""

from __future__ import annotations

import pytest
import torch

from torch_armllm.ops import tables


@pytest.mark.parametrize("text", ["", "enum dtype float32 0\ninstruction embed\nfield view ids\n"])
def test_a_library_without_schemes_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(torch.ops.armllm, "plan_tables", lambda: text)
    with pytest.raises(ImportError, match=r"older than its Python code; build it again with"):
        tables._read()
