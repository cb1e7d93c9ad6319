"""The layers of a model that a stage of a pipeline computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.tracing_memory import released_tracing_memory
from torch_armllm.kv_cache.dtypes import KV_CACHE_DTYPES
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.parallel.stage import Stage
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.divisible_model import divisible_model
from torch_armllm.patching.patch import remove_plan
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.quant.inspection import is_packed
from torch_armllm.system.huge_pages import collapse


@dataclass
class StagedModel:
    """A stage of a model.

    Attributes:
        model: the stage's layers; the first stage has the output layer too.
        whole_shape: shape of the cache of all stages.
        description: of the whole model, which is equal on all stages that fit together.
    """

    model: PlanModel
    whole_shape: Shape
    description: str


@torch.no_grad()
def staged_model(model: Any, kv_cache_dtype: str | None, number: int, count: int) -> StagedModel:
    """Returns the layers of a stage, with weights of its own.

    Args:
        model: a patched model.  It is unpatched, and no longer needed.
        kv_cache_dtype: see `torch_armllm.patch`.
        number: of the stage.
        count: number of stages.

    Raises:
        ValueError: the model has no native plan, or cannot be cut into so many stages.
    """
    whole = divisible_model(model, "pipeline_parallel_size")
    remove_plan(model)
    cache_dtype = None if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype]
    stage = Stage(number, count, sum(tensor.nbytes for tensor in whole.head.tensors))
    with released_tracing_memory():
        try:
            built = build_plan(model, is_packed(model), cache_dtype, stage=stage)
        except CaptureError as reason:
            raise ValueError(f"{whole.name} cannot be cut into {count} stages: {reason}") from reason
    if not isinstance(built.plan, NativePlan):
        raise ValueError(f"{whole.name} cannot be cut into stages: {'; '.join(built.notes)}")
    if built.shape.block_size != whole.shape.block_size:
        raise ValueError(f"{whole.name} cannot be cut into stages: their caches differ in the size of blocks")
    head = whole.head if stage.is_first else whole.head.without_weights()
    collapse([*built.plan.program.constants, *head.tensors])
    program = whole.plan.program
    facts = whole.name, count, program.opcodes, program.columns, program.dtype, whole.vocab_size, whole.shape
    return StagedModel(
        replace(whole, plan=built.plan, shape=built.shape, head=head), whole.shape, repr(facts)
    )
