"""Plans of tensor parallel ranks, built one after another without the check that ranks do together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_armllm.capture.export import capture
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.lora.read_slots import slots_read_by
from torch_armllm.lora.slot_set import SlotSet
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.passes import PassContext, run_passes
from torch_armllm.passes.lib.adapter_columns import adapter_columns
from torch_armllm.passes.lib.cache_layout import cache_layout
from torch_armllm.patching.sharded_slots import sharded_slots
from torch_armllm.plan.infer_cache import cache_shape_of, shape_of_rank
from torch_armllm.plan.make import make_plan
from torch_armllm.plan.native import NativePlan


def _build(model: Any, group: RankGroup | None) -> tuple[NativePlan, Shape, PassContext, list[Any]]:
    captured = capture(kind_of(model))
    graph = captured.graph_module
    context = PassContext(layout=cache_layout(graph), group=group)
    assert context.layout is not None
    shape = cache_shape_of(base_model_of(model), graph, context.layout, None)
    run_passes(graph, context)
    shape = shape_of_rank(shape, graph, context)
    plan, reason = make_plan(graph)
    assert isinstance(plan, NativePlan), reason
    columns = [replace(each, name=captured.names[each.name]) for each in adapter_columns(graph)]
    return plan, shape, context, columns


def built(model: Any, group: RankGroup | None) -> tuple[NativePlan, Shape, bool]:
    """Returns the plan of a rank, the shape of its cache, and whether it has some heads only."""
    plan, shape, context, _ = _build(model, group)
    return plan, shape, bool(context.key_heads)


def built_with_slots(model: Any, group: RankGroup | None) -> tuple[NativePlan, Shape, SlotSet]:
    """Returns the plan of a rank, the shape of its cache, and the slots that the plan reads."""
    plan, shape, _, columns = _build(model, group)
    slots = slots_read_by(model, plan.program.constants)
    assert slots is not None
    if group is None:
        return plan, shape, slots
    return plan, shape, sharded_slots(model, slots, plan.program.constants, columns, has_head=False)
