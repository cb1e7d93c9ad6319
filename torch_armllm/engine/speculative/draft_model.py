"""Guesses by a smaller model, which sequences ahead with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import Protocol

import torch
from torch import Tensor

from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling.batch import is_greedy
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.speculative.rejection import GUESS
from torch_armllm.engine.step import Scheduled, Step


class Runner(Protocol):
    """What computes the draft model: a `PlanRunner` of its own."""

    block_size: int
    vocab_size: int

    def execute(self, step: Step) -> Tensor:
        """Logits of all wanted positions."""
        ...


class DraftSequence:
    """What the draft model has read of a sequence.

    Attributes:
        shadow: stands for the sequence in the draft model's steps; it has known tokens and guessed ones.
        known: how many tokens the sequence had when it was last looked at.
        probabilities: with which each guessed token was drawn, where they are needed.
    """

    def __init__(self, sequence: Sequence) -> None:
        request = sequence.request
        self.shadow = Request(request.request_id, request.prompt_token_ids, SamplingParams(), 0).sequences[0]
        self.known = sequence.prompt_length
        self.probabilities: list[Tensor] = []

    def follow(self, tokens: GenericSequence[int]) -> None:
        """Takes the sequence's tokens for its own; what it guessed right stays computed."""
        shadow, same = self.shadow, self.known
        most = min(len(shadow.token_ids), len(tokens))
        while same < most and shadow.token_ids[same] == tokens[same]:
            same += 1
        shadow.token_ids[same:] = tokens[same:]
        shadow.computed = min(shadow.computed, same, len(tokens) - 1)
        self.known = len(tokens)
        self.probabilities = []

    @property
    def guessed(self) -> list[int]:
        """The tokens behind those that are known."""
        return self.shadow.token_ids[self.known :]

    def scheduled(self, most: int) -> Scheduled:
        """What is not computed yet, up to ``most`` tokens."""
        start = self.shadow.computed
        return Scheduled(self.shadow, start, min(len(self.shadow.token_ids) - start, most))


class DraftModelProposer:
    """Proposes what a smaller model of the same vocabulary would sequence.

    It draws by the sequence's own settings, seed and steps, so with the random numbers that the large model
    will use: where both find the same probable they draw the same token, at temperature 0 the most probable.
    For rejection sampling it draws with others, and tells how probable each token was.

    Args:
        runner: of the draft model.
        num_blocks: the runner's; a sequence for which none are left gets no drafts.
        sampler: the engine's.
        chunk: most tokens that are read in one go before the first guess; longer prompts take several steps
            of the engine, so that running sequences do not wait.
        longest: positions that the draft model was made for; None: no limit.
        rejection: draws for rejection sampling where the temperature is above 0.

    Raises:
        ValueError: the draft model has fewer tokens than can be drawn.
    """

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        sampler: Sampler,
        chunk: int = 512,
        longest: int | None = None,
        rejection: bool = False,
    ) -> None:
        if runner.vocab_size < sampler.vocab_size:
            raise ValueError(
                f"the draft model has {runner.vocab_size} tokens and the model {sampler.vocab_size}; "
                "give a draft model with the same tokenizer"
            )
        self._runner = runner
        self._sampler = sampler
        self._chunk = chunk
        self._longest = longest
        self._purpose = GUESS if rejection else 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._texts: dict[Sequence, DraftSequence] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Drafts, a list a sequence; none for those whose text the draft model has not read to its end."""
        self.release_finished()
        wanted = {a: count for a, count in zip(sequences, counts, strict=True) if count > 0}
        spare, steps = self._chunk, []
        for sequence, count in wanted.items():
            text = self._texts.get(sequence) or self._texts.setdefault(sequence, DraftSequence(sequence))
            text.follow(sequence.token_ids)
            if self._reserve(text.shadow, len(sequence.token_ids) + count - 1) and spare > 0:
                steps.append((sequence, text.scheduled(spare)))
                spare -= steps[-1][1].count
        while steps:
            steps = self._compute(steps, wanted)
        return [self._texts[a].guessed if a in wanted else [] for a in sequences]

    def release_finished(self) -> None:
        """Lets go what sequences hold that have come to their end."""
        for sequence in [a for a in self._texts if a.status is Status.FINISHED]:
            self._free += self._texts.pop(sequence).shadow.blocks

    def _compute(
        self, steps: list[tuple[Sequence, Scheduled]], wanted: dict[Sequence, int]
    ) -> list[tuple[Sequence, Scheduled]]:
        """Runs a step of the draft model, and gives the next one."""
        logits = self._runner.execute(Step([scheduled for _, scheduled in steps]))
        for _, scheduled in steps:
            scheduled.sequence.computed = scheduled.end
        drawing = [sequence for sequence, scheduled in steps if scheduled.draws]
        texts = [self._texts[sequence] for sequence in drawing]
        for text, token in zip(texts, self._draw(logits, drawing), strict=True):
            text.shadow.token_ids.append(token)
        return [
            (sequence, text.scheduled(1))
            for sequence, text in zip(drawing, texts, strict=True)
            if len(text.guessed) < wanted[sequence]
        ]

    def probabilities(self, sequence: Sequence) -> Tensor | None:
        """What the tokens of the sequence's draft were drawn with, ``(k, V)``; None if not needed."""
        found = self._texts[sequence].probabilities if sequence in self._texts else []
        return torch.stack(found) if found else None

    def _draw(self, logits: Tensor, sequences: GenericSequence[Sequence]) -> list[int]:
        prefixes = [self._texts[a].guessed for a in sequences]
        if self._purpose and not all(is_greedy(a.params) for a in sequences):
            found = self._sampler.probabilities(logits, sequences, prefixes, keep=True)
            for sequence, row in zip(sequences, found, strict=True):
                if not is_greedy(sequence.params):
                    self._texts[sequence].probabilities.append(row)
        return self._sampler.draw_after(logits, sequences, prefixes, self._purpose)

    def _reserve(self, shadow: Sequence, length: int) -> bool:
        """Takes blocks for so many positions; says whether there are enough."""
        if self._longest is not None and length > self._longest:
            return False
        missing = -(-length // self._runner.block_size) - len(shadow.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            shadow.blocks.append(self._free.pop())
        return True
