"""Random requests, aborts, preemptions and drafts on small memories."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.simulation import VOCABULARY, Simulation, next_token, request
from torch_armllm.engine.request import Sequence
from torch_armllm.engine.scheduling.scheduler import SchedulerConfig
from torch_armllm.kv_cache.block_manager import BlockManager

tokens = st.integers(0, VOCABULARY - 1)
shared = [next_token([i], 0) for i in range(24)]
"""Common prefix of the prompts, so that they share blocks."""


class Machine(RuleBasedStateMachine):
    """Random sequences of additions, steps and aborts."""

    @initialize(data=st.data())
    def set_up(self, data: st.DataObject) -> None:
        block_size = data.draw(st.sampled_from([1, 2, 4]), "block_size")
        max_num_seqs = data.draw(st.integers(1, 6), "max_num_seqs")
        recurrent = data.draw(st.booleans(), "recurrent")
        blocks = BlockManager(
            num_blocks=data.draw(st.integers(3, 14), "num_blocks"),
            block_size=block_size,
            swap_blocks=data.draw(st.sampled_from([0, 3, 20]), "swap_blocks"),
            enable_prefix_caching=data.draw(st.booleans(), "caching"),
            state_slots=max_num_seqs if recurrent else 0,
            swap_state_slots=data.draw(st.integers(0, 3), "swap_state_slots") if recurrent else 0,
            spare_state_slots=data.draw(st.sampled_from([0, 1, 2, 3, 5, 9, 40]), "spare") if recurrent else 0,
        )
        chunked = data.draw(st.booleans(), "chunked")
        max_model_len = data.draw(st.integers(4, 40), "max_model_len")
        least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
        budget = least + data.draw(st.integers(0, 8), "budget")
        preemption = data.draw(st.sampled_from(["recompute", "swap"]), "preemption")
        seconds = data.draw(st.sampled_from([None, None, 0.5]), "max_step_time")
        stages = data.draw(st.sampled_from([1, 1, 2, 3]), "stages")
        config = SchedulerConfig(max_num_seqs, budget, max_model_len, chunked, preemption, seconds, stages)
        self.simulation = Simulation(config, blocks)

    @rule(
        beginning=st.integers(0, len(shared)),
        rest=st.lists(tokens, max_size=5),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        max_tokens=st.integers(1, 12),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self,
        beginning: int,
        rest: list[int],
        n: int,
        priority: int,
        max_tokens: int,
        prompt_logprobs: int | None,
    ) -> None:
        scheduler = self.simulation.scheduler
        prompt = (shared[:beginning] + rest)[: scheduler.max_length - 1] or [0]
        self.simulation.add(
            request(
                str(len(self.simulation.requests)),
                prompt,
                n=min(n, scheduler.config.max_num_seqs),
                priority=priority,
                max_tokens=max_tokens,
                prompt_logprobs=prompt_logprobs,
            )
        )

    @rule(data=st.data(), drafts=st.booleans(), aborts=st.sampled_from([False, False, False, True]))
    def step(self, data: st.DataObject, drafts: bool, aborts: bool) -> None:
        abort = data.draw(self.names(), "abort") if aborts and self.simulation.requests else None
        self.simulation.step(lambda sequence: self.draft(data, sequence) if drafts else [], abort)

    @rule(steps=st.integers(2, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(self.names(), "abort")
        self.simulation.drain()
        unfinished = not self.simulation.requests[int(name)].finished
        aborted = self.simulation.scheduler.abort(name)
        assert (aborted is not None) == unfinished

    def names(self) -> st.SearchStrategy[str]:
        return st.integers(0, len(self.simulation.requests) - 1).map(str)

    @staticmethod
    def draft(data: st.DataObject, sequence: Sequence) -> list[int]:
        """Draft tokens, of which the first ones are correct."""
        right = data.draw(st.integers(0, 5), "right")
        text = list(sequence.token_ids)
        for _ in range(right):
            text.append(next_token(text, sequence.index))
        return text[len(sequence.token_ids) :] + data.draw(st.lists(tokens, max_size=3), "guesses")

    @invariant()
    def blocks_are_where_they_should_be(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run()
            self.simulation.check_end()


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
