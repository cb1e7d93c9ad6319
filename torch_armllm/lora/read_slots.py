"""The slots of a model that its plan reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torch_armllm.lora.slot_set import SlotSet
from torch_armllm.lora.slots import head_slots, slots_of


def slots_read_by(model: Any, constants: Iterable[Tensor]) -> SlotSet | None:
    """Returns the slots that a plan with these constants, and the model's head, read; None without any."""
    read = {constant.data_ptr() for constant in constants}
    found = slots_of(model)
    layers = {name: slots for name, slots in found.items() if slots.a.data_ptr() in read}
    if not layers:
        return None
    head = head_slots(model)
    if head is not None:  # another plan, or the layer itself, reads them
        layers |= {name: slots for name, slots in found.items() if slots is head}
    return SlotSet(layers, layers.keys(), head)
