"""A few random calls of every op; `make fuzz` runs more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fuzz.ops import plans, recorded, target
from tests.fuzz.ops.arguments import Spec
from tests.fuzz.ops.calls.every_op import CALLS, PLAN_OPS, RANK_OPS, STORE_OPS

SEEDS = 4000
PLAN_SEEDS = 1500


@pytest.fixture
def variant_kept() -> Iterator[None]:
    """Selects the variant of before again."""
    before = torch.ops.armllm.isa_select("")
    yield
    torch.ops.armllm.isa_select(before)


def test_random_calls(one_thread: None, variant_kept: None) -> None:
    for seed in range(SEEDS):
        target.run(seed)


def test_random_programs_and_steps(
    one_thread: None, variant_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [model for model in recorded._MODELS if model[0] in ("qwen3", "deepseek_v32")]
    monkeypatch.setattr(recorded, "_MODELS", few)
    recorded.models.cache_clear()
    for seed in range(PLAN_SEEDS):
        plans.run(seed)
    recorded.models.cache_clear()


@pytest.mark.parametrize(
    ("way", "message"), [("create", "a valid program is refused"), ("run", "valid inputs")]
)
def test_refused_valid_plan_is_a_finding(
    way: str, message: str, one_thread: None, variant_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("plan: it is refused")

    library = SimpleNamespace(
        plan_create=torch.ops.armllm.plan_create, plan_free=torch.ops.armllm.plan_free,
        plan_run=torch.ops.armllm.plan_run, isa_select=torch.ops.armllm.isa_select,
    )  # fmt: skip
    setattr(library, f"plan_{way}", refuse)
    monkeypatch.setattr(plans, "_armllm", library)
    monkeypatch.setattr(plans, "models", lambda: ())

    def run_some() -> None:
        for seed in range(100):
            plans.run(seed)

    with pytest.raises(target.Finding, match=message):
        run_some()


@pytest.mark.parametrize("layout", ["contiguous", "padded", "expanded"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.float32, torch.complex64])
def test_changes_between_replays_are_no_finding(dtype: torch.dtype, layout: str) -> None:
    """One that failed half-way looked like a step that wrote to its inputs."""
    spec = Spec((2, 5), dtype, "zeros", layout=layout)
    for seed in range(20):
        step = plans._Step(recorded.pieces(), {"ids": spec, "positions": spec}, 5, Random(seed))
        step._change_values()
        step.check("nothing")


def test_every_op_has_calls() -> None:
    schemas = Path(__file__).parents[2].joinpath("ops", "schemas.cpp").read_text()
    assert set(re.findall(r'm\.def\("(\w+)\(', schemas)) == {*CALLS, *PLAN_OPS, *STORE_OPS, *RANK_OPS}


def _beside(x: torch.Tensor) -> torch.Tensor:
    """The element before a tensor at the end of its memory, or the one after a tensor at its begin."""
    start = x.storage_offset()
    return torch.as_strided(x, (1,), (1,), start - 1 if start > 0 else x.numel())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x.fill_(0), "x was changed"),
        (lambda x: _beside(x).fill_(7.0), "memory beside x was written"),
        (lambda x: (_ for _ in ()).throw(RuntimeError("API call failed")), "what is wrong"),
        (lambda x: (_ for _ in ()).throw(RuntimeError("it does not like x")), "a valid call raised"),
    ],
    ids=["changed", "outside", "unclear", "refused"],
)
def test_wrong_op_is_a_finding(
    wrong: Any, message: str, monkeypatch: pytest.MonkeyPatch, one_thread: None, variant_kept: None
) -> None:
    monkeypatch.setattr(target, "_op", lambda name: (wrong, [], set()))
    with pytest.raises(target.Finding, match=message):
        target._run("rms_norm", {"x": Spec((3, 4), torch.float32)}, [], Random(0))


def test_result_that_depends_on_strides_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, one_thread: None, variant_kept: None
) -> None:
    monkeypatch.setattr(
        target, "_op", lambda name: (lambda x: x.as_strided((2, 4), (4, 1)).clone(), [], set())
    )
    with pytest.raises(target.Finding, match="other strides give another result"):
        target._run("rms_norm", {"x": Spec((3, 4), torch.float32, layout="padded")}, ["layout"], Random(0))
