"""Layers that share keys and values in a captured graph."""

from __future__ import annotations

import pytest
import torch

from torch_armllm.capture.export import capture
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.passes.lib.cache_layout import cache_layout
from torch_armllm.passes.lib.graph import is_op


@pytest.mark.parametrize(("dtype", "shared"), [(torch.float32, True), (torch.float64, False)])
def test_a_conversion_counts_if_it_changes_something(dtype: torch.dtype, shared: bool) -> None:
    """Releases of transformers before 5.23 convert shared keys and values to the device that they have."""
    module = capture(kind_of(tiny_model("gemma3n_text").model)).graph_module
    expected = cache_layout(module)
    assert len(set(expected.positions.values())) < len(expected.positions)
    *_, last = (n for n in module.graph.nodes if is_op(n, torch.ops.armllm.attention.default))
    for at in (1, 2):
        with module.graph.inserting_before(last):
            copy = module.graph.call_function(torch.ops.aten.to.dtype, (last.args[at], dtype))
        copy.meta["val"] = last.args[at].meta["val"].to(dtype)
        last.update_arg(at, copy)
    assert (cache_layout(module) == expected) == shared
