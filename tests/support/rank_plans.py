"""Plans of tensor parallel ranks, built one after another without the check that ranks do together."""

from __future__ import annotations

from typing import Any

from torch_armllm.capture.export import capture
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.passes import PassContext, run_passes
from torch_armllm.passes.lib.cache_layout import cache_layout
from torch_armllm.plan.infer_cache import cache_shape_of, shape_of_rank
from torch_armllm.plan.make import make_plan
from torch_armllm.plan.native import NativePlan


def built(model: Any, group: RankGroup | None) -> tuple[NativePlan, Shape, bool]:
    """Returns the plan of a rank, the shape of its cache, and whether it has some heads only."""
    captured = capture(model)
    graph = captured.graph_module
    context = PassContext(layout=cache_layout(graph), group=group)
    assert context.layout is not None
    shape = cache_shape_of(base_model_of(model), graph, context.layout, None)
    run_passes(graph, context)
    shape = shape_of_rank(shape, graph, context)
    plan, reason = make_plan(graph)
    assert isinstance(plan, NativePlan), reason
    return plan, shape, bool(context.key_heads)
