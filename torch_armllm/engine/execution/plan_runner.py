"""Computes the steps of an engine with a plan."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torch_armllm.engine.errors import OnFailure, RankFailedError
from torch_armllm.engine.execution.message import ComputeLogits, Message, ReleaseCache
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_message import step_messages
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.plan.step import Plan, StepResult


class PlanRunner:
    """Computes the steps of an engine: builds their inputs, sends them, and takes them through its executor.

    Args:
        executor: of this process.
        leader: sends the steps to the other ranks or stages; None: there are none.

    Attributes:
        executor: see above.
        leader: see above.
        stages: number of steps that may be under way: that of the stages of a pipeline.
    """

    def __init__(self, executor: StepExecutor, leader: RankLeader | None = None) -> None:
        self.executor = executor
        self.leader = leader
        self.vocab_size = executor.layers.vocab_size
        self.block_size = executor.block_size
        self.stages = executor.course.most_steps
        self._course, self._trace, self._at_work = executor.course, executor.trace, executor.at_work
        first = executor.model.first_position
        self._builder = StepBuilder(executor.caches.cache, self.block_size, first, executor.features)

    @property
    def plan(self) -> Plan:
        """Computes the layers."""
        return self.executor.plan

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache and the states, swap memory not included."""
        return self.executor.caches.nbytes

    def rows_are_exact(self) -> bool:
        """True if a token's logits are known to have the same bits whatever else a step computes."""
        return self.executor.layers.rows_are_exact()

    def on_failure(self, method: OnFailure) -> None:
        """Calls a method, which is kept weakly, once another process has failed, if there are any."""
        if self.leader is not None:
            self.leader.on_failure(method)

    def release_cache(self) -> int:
        """Gives the memory of the KV cache back on all ranks; returns the bytes of this one."""
        if self.leader is not None:
            self.leader.send(ReleaseCache())
        return self.executor.caches.release()

    def execute(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits ``(R, vocab_size)`` in the model's dtype: the rows of every `Scheduled.logit_positions`, in
            the order of ``step.scheduled``.
        """
        return self.compute(step).logits

    def compute(self, step: Step, best: bool = False) -> StepResult:
        """Computes a step while no other is under way; see `begin`."""
        self.begin(step, best)
        return self.finish()

    def begin(self, step: Step, best: bool = False) -> None:
        """Begins a step: builds its inputs, and sends it to the other ranks and stages.

        Args:
            step: to compute.
            best: asks for the most probable tokens too; they are returned if they cost little.

        Raises:
            RankFailedError: a rank or stage has failed.
        """
        try:
            with self._at_work:
                self._begin(step, best)
        except Exception as error:
            if self.leader is None:
                raise
            raise self._fail(self.leader, error) from error

    def _begin(self, step: Step, best: bool) -> None:
        self.copy_blocks(step)
        rows: list[int] | None = None
        if step.decode_only:
            inputs = self._builder.decode(step)
        else:
            inputs, rows = self._builder.build(step)
            if len(rows) == inputs.tokens:
                rows = None
        if self.leader is not None:
            for message in step_messages(step, inputs, rows, best, self.executor.features):
                self.leader.send(message)
        self._trace.mark("prepare")
        self._course.begin(inputs, rows, best)

    def copy_blocks(self, step: Step) -> None:
        """Copies the blocks of a step: swaps out, swaps in, and copy-on-write."""
        self.executor.caches.copy_blocks(step.swaps_out, step.swaps_in, step.copies)

    def finish(self) -> StepResult:
        """Computes the oldest step under way as far as it is not computed, and returns its result.

        Raises:
            RankFailedError: a rank or stage has failed.
        """
        if self.leader is None:
            return self._course.finish()
        try:
            if self._course.shares_logits:
                self.leader.send(ComputeLogits())
            return self._course.finish()
        except Exception as error:
            raise self._fail(self.leader, error) from error

    def _fail(self, leader: RankLeader, error: Exception) -> RankFailedError:
        """Ends all processes, those that wait for rows of this one too; returns the error of the engine."""
        failed = leader.fail(error)
        self._course.close()
        return failed

    def tell(self, messages: Iterable[Message]) -> None:
        """Sends messages to all other processes, if there are any, between two steps.

        Raises:
            RankFailedError: one of them has failed.
        """
        if self.leader is None:
            return
        try:
            for message in messages:
                self.leader.send(message)
        except Exception as error:
            raise self._fail(self.leader, error) from error
