"""The slots for adapters of a sharded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.lora.expert_slots import ExpertSlots
from torch_armllm.lora.slot_set import SlotSet
from torch_armllm.lora.slots import EmbeddingSlots, LoraSlots
from torch_armllm.passes.lib.adapter_columns import AdapterColumns


def sharded_slots(
    model: Any, whole: SlotSet, constants: Sequence[Tensor], columns: Sequence[AdapterColumns], has_head: bool
) -> SlotSet:
    """Leaves what a process computes in the slots of a model, and lets the memory of its weights go.

    Args:
        model: whose shard the process computes.
        whole: the slots that the plan of the whole model reads.
        constants: of the process's plan.
        columns: what it has of layers whose columns are sharded.
        has_head: the process computes logits.
    """
    base = base_model_of(model)
    for each in columns:
        slots = base.get_submodule(each.name.rpartition(".")[0])
        assert isinstance(slots, LoraSlots)
        slots.keep(each.columns, each.factors)
    read = {constant.data_ptr() for constant in constants}
    head = whole.head if has_head else None
    own = {n for n, slots in whole.layers.items() if slots.a.data_ptr() in read or slots is head}
    for name, slots in whole.layers.items():
        if name in own and not isinstance(slots, ExpertSlots):
            slots.a.zero_()  # written at once, so that it counts as used before the KV cache is sized
            slots.b.zero_()
        compares = name in own and (isinstance(slots, EmbeddingSlots) or slots is head)
        if not compares:
            slots.forget_layer()
    return replace(whole, own=own, head=head)
