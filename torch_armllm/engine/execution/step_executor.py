"""The parts by which a process computes steps, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.stage_course import LinkedStage, StageCourse
from torch_armllm.engine.execution.step_caches import StepCaches
from torch_armllm.engine.execution.step_course import StepCourse, WholeCourse
from torch_armllm.engine.execution.step_feature import NOTHING_HELD, StepFeature, StepFeatures
from torch_armllm.engine.execution.step_layers import StepLayers
from torch_armllm.engine.execution.step_states import StepStates
from torch_armllm.engine.reports.trace import NO_TRACE, Trace
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import Plan


class StepExecutor:
    """The caches, features and layers of a process, and the course of steps through them.

    Every process of an engine has one.

    Args:
        model: see `ServableModel`; the part of it that this process computes.
        sizes: of the caches.
        features: of steps, beside tokens.
        shape: of the KV cache and the states; None: the model's own.
        trace: records the phases of steps.
        at_work: what holds while this process computes.
        stage: of a pipeline; None: there is none.
    """

    def __init__(
        self,
        model: ServableModel,
        sizes: ExecutorSizes,
        features: Sequence[StepFeature] = (),
        shape: Shape | None = None,
        trace: Trace = NO_TRACE,
        at_work: AbstractContextManager[Any] = NOTHING_HELD,
        stage: LinkedStage | None = None,
    ) -> None:
        self.model, self.trace, self.at_work = model, trace, at_work
        self.shape = model.shape if shape is None else shape
        self.block_size = self.shape.block_size
        self.caches = caches = StepCaches(self.shape, sizes)
        if caches.states or sizes.state_slots:  # of this process, or of other stages
            features = (StepStates(caches.states, caches.swapped_states), *features)
        self.features = StepFeatures(features)
        self.layers = StepLayers(model, self.features, sizes.drawable, trace)
        self.course: StepCourse
        if stage is None:
            self.course = WholeCourse(self.layers, self.features, at_work)
        else:
            self.course = StageCourse(stage, self.layers, self.features, trace, at_work)

    @property
    def plan(self) -> Plan:
        """Computes the layers."""
        return self.layers.plan
