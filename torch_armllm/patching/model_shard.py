"""The shard of a model that a process computes: a stage's layers, a rank's columns, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.tracing_memory import released_tracing_memory
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.dtypes import KV_CACHE_DTYPES
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.lora.read_slots import slots_read_by
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.stage import Stage
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.patch import remove_plan
from torch_armllm.patching.patched_model import servable_model
from torch_armllm.patching.sharded_slots import sharded_slots
from torch_armllm.patching.state import require_native_plan
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.quant.inspection import is_packed
from torch_armllm.system.huge_pages import collapse


@dataclass
class ModelShard:
    """A shard of a model.

    Attributes:
        model: what this process computes.  The first stage has the output layer too, or a rank's shard of it.
        whole_shape: shape of the cache of the whole model.
        description: of the whole model; it is equal in all processes whose shards fit together.
    """

    model: PlanModel
    whole_shape: Shape
    description: str


@torch.no_grad()
def model_shard(
    kind: ModelKind, kv_cache_dtype: str | None, place: RankPlace, group: RankGroup | None
) -> ModelShard:
    """Returns the shard of a process, with weights of its own.

    Args:
        kind: of a patched model.  It is unpatched, and no longer needed.
        kv_cache_dtype: see `torch_armllm.patch`.
        place: of this process.
        group: the ranks of this process's stage, all of which call this at the same time; None: it is one.

    Raises:
        ValueError: the model has no native plan, cannot be sharded so, or has no experts.
    """
    setting = "tensor_parallel_size" if place.stages == 1 else "pipeline_parallel_size"
    model = kind.model
    whole = _whole_model(kind, setting)
    if group is not None and group.whole_experts and "moe" not in whole.plan.program.opcodes:
        raise ValueError(
            f"enable_expert_parallel is for models with quantized experts, and {whole.name} has none: leave "
            "it out"
        )
    remove_plan(model)
    cache_dtype = None if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype]
    stage = None
    if place.stages > 1:
        stage = Stage(place.stage, place.stages, sum(tensor.nbytes for tensor in whole.head.tensors))
    refusal = f"{whole.name} cannot be divided by {setting}"
    with released_tracing_memory():
        try:
            built = build_plan(kind, is_packed(model), cache_dtype, group=group, stage=stage)
        except CaptureError as reason:
            raise ValueError(f"{refusal}: {reason}") from reason
    if (plan := native_plan(built.plan)) is None:
        raise ValueError(f"{refusal}: {'; '.join(built.notes)}")
    if built.shape.block_size != whole.shape.block_size:
        raise ValueError(f"{refusal}: the caches of its parts differ in the size of blocks")
    head = whole.head
    if place.stage > 0:
        head = head.without_weights()
    elif group is not None:
        head = head.shard(group)
    slots = whole.slots
    if slots is not None:
        has_head = place.stage == 0
        slots = sharded_slots(model, slots, plan.program.constants, built.adapter_columns, has_head)
        slots = replace(slots, ranks=place.tensor_ranks)
    collapse([*plan.program.constants, *head.tensors])
    program = whole.plan.program
    facts = whole.name, program.opcodes, program.columns, program.dtype, whole.vocab_size, whole.shape
    shard = replace(whole, plan=plan, shape=built.shape, head=head, slots=slots)
    return ModelShard(shard, whole.shape, repr((*facts, place.tensor_ranks, place.stages)))


def _whole_model(kind: ModelKind, setting: str) -> PlanModel:
    """Returns the plan and the output layer of a patched model, which share memory with it.

    Args:
        kind: of a patched model.
        setting: name of the setting that needs them, for errors.

    Raises:
        ValueError: the model has no native plan, or its output layer is not one matrix product.
    """
    model, name = kind.model, kind.name
    servable = servable_model(model)
    plan = require_native_plan(model, servable, setting)
    assert servable is not None
    program = plan.program
    head = servable.head.weights(torch.empty(1, program.columns, dtype=program.dtype))
    if head is None:
        raise ValueError(
            f"{setting} needs an output layer that is one matrix product, and that of {name} "
            "does more: leave it out"
        )
    return PlanModel(
        name=servable.name,
        plan=plan,
        shape=servable.shape,
        vocab_size=servable.vocab_size,
        max_length=servable.max_length,
        first_position=servable.first_position,
        position_limit=servable.position_limit,
        stated_positions=servable.stated_positions,
        head=head,
        generation_config=servable.generation_config,
        slots=slots_read_by(model, program.constants),
    )
