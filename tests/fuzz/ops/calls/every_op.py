"""A maker of valid random calls for every op."""

from __future__ import annotations

import json
from functools import cache
from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.attention import ATTENTION
from tests.fuzz.ops.calls.draws import WIDTHS, Makers, any_float, leading
from tests.fuzz.ops.calls.entries import ENTRIES
from tests.fuzz.ops.calls.experts import EXPERTS
from tests.fuzz.ops.calls.linear import LINEAR
from tests.fuzz.ops.calls.packing import PACKING
from tests.fuzz.ops.calls.recurrent import RECURRENT
from tests.fuzz.ops.calls.rows import ROWS
from tests.fuzz.ops.calls.sampling import SAMPLING
from torch_armllm.ops.collective import communicator_memory, open_communicator


@cache
def variants() -> tuple[str, ...]:
    """Returns the kernel variants that run on this CPU."""
    return tuple(json.loads(torch.ops.armllm.isa_list())["runnable"])


def _isa_select(draw: Random) -> Call:
    return {"name": draw.choice(variants())}


@cache
def _one_rank() -> int:
    """Returns a communicator of this process alone."""
    return open_communicator(communicator_memory(1, 1 << 20), 0, 1, 1 << 20)


def _gather_columns(draw: Random) -> Call:
    width = draw.choice(WIDTHS)
    x = Spec((*leading(draw), width), any_float(draw))
    return {"x": x, "communicator": _one_rank(), "columns": [width]}


def _nothing(draw: Random) -> Call:
    return {}


CALLS: Makers = {
    **LINEAR,
    **PACKING,
    **EXPERTS,
    **ROWS,
    **ATTENTION,
    **RECURRENT,
    **ENTRIES,
    **SAMPLING,
    "gather_columns": _gather_columns,
    "isa_select": _isa_select,
    "isa_list": _nothing,
    "team_threads": _nothing,
    "plan_tables": _nothing,
}
PLAN_OPS = ("plan_create", "plan_run", "plan_run_then", "plan_profile", "plan_free")
"""Ops of the target ``plans``."""
STORE_OPS = ("experts_open", "experts_require", "experts_counts", "experts_resident")
"""Ops without random calls: they act on files, and `tests/plan/test_expert_store.py` draws their requests."""
RANK_OPS = ("communicator_open", "communicator_close")
"""Likewise: a process has few communicators, and `tests/ops/test_collective.py` opens them wrongly."""
