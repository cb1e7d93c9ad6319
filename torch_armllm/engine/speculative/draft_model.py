"""Drafts by a smaller model with its own KV cache."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import Protocol

import torch
from torch import Tensor

from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling.batch import is_greedy
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.engine.speculative.draft_states import DraftStates
from torch_armllm.engine.speculative.rejection import DRAFT


class DraftRunner(Protocol):
    """Runs the draft model: a `PlanRunner`."""

    block_size: int
    vocab_size: int

    def execute(self, step: Step) -> Tensor:
        """Returns the logits of all requested positions."""
        ...


class DraftSequence:
    """State of one sequence in the draft model.

    Attributes:
        shadow: the sequence in the draft model's steps; holds known and draft tokens.
        num_known: number of tokens of the sequence at the last `follow`.
        probabilities: distributions of the draft tokens, if rejection sampling needs them.
    """

    def __init__(self, sequence: Sequence) -> None:
        request = sequence.request
        self.shadow = Request(request.request_id, request.prompt_token_ids, SamplingParams(), 0).sequences[0]
        self.num_known = sequence.prompt_length
        self.probabilities: list[Tensor] = []

    def follow(self, tokens: GenericSequence[int]) -> None:
        """Copies the sequence's tokens; the computed state of accepted draft tokens stays valid."""
        shadow, same = self.shadow, self.num_known
        most = min(len(shadow.token_ids), len(tokens))
        while same < most and shadow.token_ids[same] == tokens[same]:
            same += 1
        shadow.token_ids[same:] = tokens[same:]
        shadow.computed = min(shadow.computed, same, len(tokens) - 1)
        self.num_known = len(tokens)
        self.probabilities = []

    @property
    def draft(self) -> list[int]:
        """The draft tokens, which follow the known tokens."""
        return self.shadow.token_ids[self.num_known :]

    def scheduled(self, most: int) -> Scheduled:
        """Schedules the tokens that are not computed yet, up to ``most``."""
        start = self.shadow.computed
        return Scheduled(self.shadow, start, min(len(self.shadow.token_ids) - start, most))


class DraftModelProposer:
    """Drafts tokens with a smaller model of the same vocabulary.

    It samples with the sequence's own settings, seed and steps, so with the random numbers that the target
    model will use: similar distributions yield the same token, at temperature 0 the most probable one.  For
    rejection sampling it uses independent random numbers and keeps the distribution of each token.

    Args:
        runner: of the draft model.
        num_blocks: KV cache blocks of the runner; sequences without free blocks get no drafts.
        sampler: the engine's.
        chunk: most prefill tokens before the first draft token; longer prompts take several engine steps,
            so that running sequences do not wait.
        max_length: maximum context length of the draft model; None: unlimited.
        rejection: samples for rejection sampling at temperatures above 0.
        state_slots: slots of the runner for states of recurrent layers; sequences without a free one get no
            drafts.

    Attributes:
        states: slots of the sequences; None without recurrent layers.

    Raises:
        ValueError: the draft model's vocabulary is smaller than the sampler's.
    """

    chooses_lengths = False

    def __init__(
        self,
        runner: DraftRunner,
        num_blocks: int,
        sampler: Sampler,
        chunk: int = 512,
        max_length: int | None = None,
        rejection: bool = False,
        state_slots: int = 0,
    ) -> None:
        if runner.vocab_size < sampler.vocab_size:
            raise ValueError(
                f"the draft model has {runner.vocab_size} tokens and the model {sampler.vocab_size}; "
                "use a draft model with the same tokenizer"
            )
        self._runner = runner
        self._sampler = sampler
        self._chunk = chunk
        self._max_length = max_length
        self._purpose = DRAFT if rejection else 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self.states = DraftStates(state_slots) if state_slots else None
        self._drafts: dict[Sequence, DraftSequence] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free)

    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Returns one draft per sequence, empty while the draft model's prefill is not complete."""
        self.release_finished()
        draft_lengths = {a: count for a, count in zip(sequences, counts, strict=True) if count > 0}
        spare, steps = self._chunk, []
        for sequence, count in draft_lengths.items():
            state = self._drafts.get(sequence) or self._drafts.setdefault(sequence, DraftSequence(sequence))
            state.follow(sequence.token_ids)
            if self.states is not None:
                self.states.go_back(state.shadow)
            if self._reserve(state.shadow, len(sequence.token_ids) + count - 1) and spare > 0:
                steps.append((sequence, state.scheduled(spare)))
                spare -= steps[-1][1].count
        while steps:
            steps = self._compute(steps, draft_lengths)
        return [self._drafts[a].draft if a in draft_lengths else [] for a in sequences]

    def record_step(self, sequences: int, drafted: int, seconds: float) -> None:
        """Does nothing: lengths do not depend on times."""

    def release_finished(self) -> None:
        """Frees the blocks of finished sequences."""
        for sequence in [a for a in self._drafts if a.status is Status.FINISHED]:
            shadow = self._drafts.pop(sequence).shadow
            self._free += shadow.blocks
            if self.states is not None:
                self.states.release(shadow)

    def _compute(
        self, steps: list[tuple[Sequence, Scheduled]], draft_lengths: dict[Sequence, int]
    ) -> list[tuple[Sequence, Scheduled]]:
        """Runs a step of the draft model and returns the next step."""
        if self.states is not None:
            for sequence, scheduled in steps:
                drafted = len(self._drafts[sequence].draft) + 1
                goes_on = scheduled.samples and drafted < draft_lengths[sequence]
                self.states.advance(scheduled.sequence, scheduled.end, goes_on)
        step = Step([scheduled for _, scheduled in steps], saves_states=self.states is not None)
        logits = self._runner.execute(step)
        for _, scheduled in steps:
            scheduled.sequence.computed = scheduled.end
        drawing = [sequence for sequence, scheduled in steps if scheduled.samples]
        states = [self._drafts[sequence] for sequence in drawing]
        for state, token in zip(states, self._draw(logits, drawing), strict=True):
            state.shadow.token_ids.append(token)
        return [
            (sequence, state.scheduled(1))
            for sequence, state in zip(drawing, states, strict=True)
            if len(state.draft) < draft_lengths[sequence]
        ]

    def probabilities(self, sequence: Sequence) -> Tensor | None:
        """Returns the distributions ``(k, V)`` from which a draft was sampled; None if not needed."""
        distributions = self._drafts[sequence].probabilities if sequence in self._drafts else []
        return torch.stack(distributions) if distributions else None

    def _draw(self, logits: Tensor, sequences: GenericSequence[Sequence]) -> list[int]:
        prefixes = [self._drafts[a].draft for a in sequences]
        if self._purpose and not all(is_greedy(a.params) for a in sequences):
            distributions = self._sampler.probabilities(logits, sequences, prefixes, keep=True)
            for sequence, row in zip(sequences, distributions, strict=True):
                if not is_greedy(sequence.params):
                    self._drafts[sequence].probabilities.append(row)
        return self._sampler.draw_after(logits, sequences, prefixes, self._purpose)

    def _reserve(self, shadow: Sequence, length: int) -> bool:
        """Allocates blocks for ``length`` positions, and a state slot; False if there are too few."""
        if self._max_length is not None and length > self._max_length:
            return False
        if self.states is not None and not self.states.begin(shadow):
            return False
        missing = -(-length // self._runner.block_size) - len(shadow.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            shadow.blocks.append(self._free.pop())
        return True
