"""The part of a model that a tensor parallel rank computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.tracing_memory import released_tracing_memory
from torch_armllm.kv_cache.dtypes import KV_CACHE_DTYPES
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.divisible_model import divisible_model
from torch_armllm.patching.patch import remove_plan
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.quant.inspection import is_packed
from torch_armllm.system.huge_pages import collapse


@torch.no_grad()
def divided_model(model: Any, kv_cache_dtype: str | None, group: RankGroup) -> PlanModel:
    """Returns this rank's part of a model, with weights of its own; all ranks call this at the same time.

    Args:
        model: a patched model.  It is unpatched, and no longer needed.
        kv_cache_dtype: see `torch_armllm.patch`.
        group: the ranks.

    Raises:
        ValueError: the model has no native plan, an output layer that cannot be shared out, or no experts to
            share out whole.
    """
    whole = divisible_model(model, "tensor_parallel_size")
    if group.whole_experts and "moe" not in whole.plan.program.opcodes:
        raise ValueError(
            f"enable_expert_parallel is for models with quantized experts, and {whole.name} has none: leave "
            "it out"
        )
    remove_plan(model)
    cache_dtype = None if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype]
    with released_tracing_memory():
        try:
            built = build_plan(model, is_packed(model), cache_dtype, group=group)
        except CaptureError as reason:
            raise ValueError(f"{whole.name} cannot be shared out among ranks: {reason}") from reason
    if not isinstance(built.plan, NativePlan):
        raise ValueError(f"{whole.name} cannot be shared out among ranks: {'; '.join(built.notes)}")
    own_head = whole.head.divided(group)
    collapse([*built.plan.program.constants, *own_head.tensors])
    return replace(whole, plan=built.plan, shape=built.shape, head=own_head)
