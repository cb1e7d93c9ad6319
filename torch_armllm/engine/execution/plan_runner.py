"""Computes the steps of an engine with a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from torch_armllm.engine.errors import OnFailure, RankFailedError
from torch_armllm.engine.execution.adapter_rows import adapter_runs
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.rank_leader import RankLeader, RankWatch
from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_features import TEXTS, StepFeatures
from torch_armllm.engine.execution.step_message import Signal
from torch_armllm.engine.execution.thread_team import ThreadTeam
from torch_armllm.engine.pictures.picture_input import PictureInput
from torch_armllm.engine.step import Step
from torch_armllm.engine.trace import NO_TRACE, Trace
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.lora.slot_set import Factors
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step_result import StepResult


class PlanRunner(StepExecutor):
    """Computes the steps of an engine: builds their inputs, and runs its plan.

    Args:
        model: see `ServableModel`.
        sizes: of the caches.
        features: of steps, beside tokens.
        shape: of the KV cache and the states; None: the model's own.
        trace: records the phases of steps.
        team: compute threads; None: torch's own.
        leader: sends the steps to the other ranks or stages; None: there are none.
    """

    def __init__(
        self,
        model: ServableModel,
        sizes: ExecutorSizes,
        features: StepFeatures = TEXTS,
        shape: Shape | None = None,
        trace: Trace = NO_TRACE,
        team: ThreadTeam | None = None,
        leader: RankLeader | None = None,
    ) -> None:
        super().__init__(model, sizes, features, shape, trace)
        first = model.first_position
        self._builder = StepBuilder(self.cache, self.block_size, first, self.states, features.pictures)
        self._leader = leader
        self._at_work = nullcontext() if team is None else team.at_work()

    @property
    def leader(self) -> RankLeader | None:
        """Sends the steps to the other processes that compute them; None if there are none."""
        return self._leader

    def watched_by(self, watch: RankWatch) -> None:
        """Sets what says which rank has failed, if several processes compute the steps."""
        if self._leader is not None:
            self._leader.watch = watch

    def on_failure(self, method: OnFailure) -> None:
        """Calls a method, which is kept weakly, once another process has failed, if there are any."""
        if self._leader is not None:
            self._leader.on_failure(method)

    def release_cache(self) -> int:
        """Gives the memory of the KV cache back on all ranks; returns the bytes of this one."""
        if self._leader is not None:
            self._leader.tell(Signal.RELEASE)
        return super().release_cache()

    def execute(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits ``(R, vocab_size)`` in the model's dtype: the rows of every `Scheduled.logit_positions`, in
            the order of ``step.scheduled``.
        """
        return self.compute(step).logits

    def compute(self, step: Step, best: bool = False) -> StepResult:
        """Computes a step; see `execute`.

        Args:
            step: to compute.
            best: asks for the most probable tokens too; they are returned if they cost little.
        """
        with self._at_work, self._holding(step):
            if self._leader is None:
                return self._compute(step, best)
            try:
                return self._compute(step, best)
            except Exception as error:
                raise self._fail(error) from error

    def _holding(self, step: Step) -> AbstractContextManager[None]:
        return nullcontext() if self.slots is None else self.holding(adapter_runs(step))

    def _fail(self, error: Exception) -> RankFailedError:
        """Ends all processes that compute steps together; returns the error of the engine."""
        assert self._leader is not None
        return self._leader.fail(error)

    def share_adapter(self, slot: int, factors: Factors) -> None:
        """Writes an adapter to a slot of all other processes, if there are any, between two steps.

        Raises:
            RankFailedError: one of them has failed.
        """
        if self._leader is None:
            return
        assert self.slots is not None
        try:
            self._leader.send_adapter(slot, list(self.slots.layers), factors)
        except Exception as error:
            raise self._fail(error) from error

    def _compute(self, step: Step, best: bool) -> StepResult:
        self.copy_blocks(step)
        rows: list[int] | None = None
        if step.decode_only and best and self._fused_head is not None:
            inputs = self._builder.decode(step)
        else:
            inputs, rows = self._builder.build(step)
            if len(rows) == inputs.tokens:
                rows = None
        if self._leader is not None:
            self._leader.send(step, inputs, rows, best, self._shown)
        self._trace.mark("prepare")
        return self.run(inputs, rows, best)

    @property
    def _shown(self) -> PictureInput | None:
        """Rows of the pictures of the step that was built; None: there are no pictures."""
        return None if self.pictures is None else self.pictures.rows

    def copy_blocks(self, step: Step) -> None:
        """Copies the states and blocks of a step: states in order, swaps out, swaps in, and copy-on-write."""
        self.copy(step.state_moves, step.swaps_out, step.swaps_in, step.copies)
