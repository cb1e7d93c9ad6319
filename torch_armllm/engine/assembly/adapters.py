"""The table of an engine's adapters."""

from __future__ import annotations

from typing import Any

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.factor_message import factor_pieces
from torch_armllm.engine.llm_engine import Runner
from torch_armllm.lora.adapter_table import AdapterTable
from torch_armllm.lora.slot_set import Factors
from torch_armllm.patching.state import require_native_plan
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.servable_model import ServableModel


def adapter_table(model: Any, servable: ServableModel | None, config: EngineConfig) -> AdapterTable | None:
    """Returns the table of the adapters in the slots that a model's plan reads; None: there are to be none.

    Raises:
        ValueError: the model has no slots, or no native plan that reads them; or it has slots, which are
            another engine's.
    """
    if not config.enable_lora:
        plan = None if servable is None else native_plan(servable.plan)
        if plan is not None and "lora" in plan.opcodes:
            raise ValueError(
                "this model's layers have slots for the adapters of another engine: set enable_lora=True, or "
                "load the model once more"
            )
        return None
    require_native_plan(model, servable, "enable_lora")
    assert servable is not None
    if (slots := servable.slots) is None:
        raise ValueError(
            "enable_lora needs slots for adapters, and this model was patched without: load it with "
            "LLM(folder, enable_lora=True)"
        )
    return AdapterTable(slots, config.max_lora_rank)


def share_adapters(table: AdapterTable, runner: Runner) -> None:
    """Lets a table write its adapters to the slots of all processes that compute with a runner."""
    layers = list(table.slots.layers)

    def share(slot: int, factors: Factors) -> None:
        runner.tell(factor_pieces(slot, layers, factors))

    table.share_by(share)
