"""The plan's steps of a patched model's calls, and the names of the cache in the installed transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers.utils import ModelOutput

from torch_armllm.hf.cache_names import CACHE_NAMES, cache_argument
from torch_armllm.patching.state import patched_forward

_WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba")


class PlanSteps:
    """Number of the steps that a plan has run.

    Attributes:
        count: the number.
    """

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def plan_steps(model: Any) -> Iterator[PlanSteps]:
    """Counts the steps of a patched model's plan; calls that its modules compute are errors."""
    forward = patched_forward(model)
    assert forward is not None
    steps, run = PlanSteps(), forward.plan.run

    def count(*args: Any) -> Any:
        steps.count += 1
        return run(*args)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("modules computed a step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward.plan, "run", count)
        patch.setattr(forward.calls, "module_forward", fail)
        yield steps


def names_of_cache(model: Any) -> list[str]:
    """Returns the names by which a model takes its cache, and by which its outputs have it."""
    own = cache_argument(model.forward)
    before = "cache_params" if model.config.model_type in _WITHOUT_ATTENTION else "past_key_values"
    return [own, before] if own == CACHE_NAMES[0] and hasattr(ModelOutput, before) else [own]
