"""Guesses by a smaller model, which answers ahead with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torch_armllm.engine.request import Answer, Request, Status
from torch_armllm.engine.sampling.batch import is_greedy
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.speculative.rejection import GUESS
from torch_armllm.engine.step import Scheduled, Step


class Runner(Protocol):
    """What computes the draft model: a `ModelRunner` of its own."""

    block_size: int
    vocabulary: int

    def execute(self, step: Step) -> Tensor:
        """Logits of all wanted positions."""
        ...


class DraftSequence:
    """What the draft model has read of an answer.

    Attributes:
        shadow: stands for the answer in the draft model's steps; it has known tokens and guessed ones.
        known: how many tokens the answer had when it was last looked at.
        probabilities: with which each guessed token was drawn, where they are needed.
    """

    def __init__(self, answer: Answer) -> None:
        request = answer.request
        self.shadow = Request(request.request_id, request.prompt_token_ids, SamplingParams(), 0).answers[0]
        self.known = answer.prompt_length
        self.probabilities: list[Tensor] = []

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes the answer's tokens for its own; what it guessed right stays computed."""
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
    """Proposes what a smaller model of the same vocabulary would answer.

    It draws by the answer's own settings, seed and steps, so with the random numbers that the large model
    will use: where both find the same probable they draw the same token, at temperature 0 the most probable.
    For rejection sampling it draws with others, and tells how probable each token was.

    Args:
        runner: of the draft model.
        num_blocks: the runner's; an answer for which none are left gets no drafts.
        sampler: the engine's.
        chunk: most tokens that are read in one go before the first guess; longer prompts take several steps
            of the engine, so that running answers do not wait.
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
        if runner.vocabulary < sampler.vocab_size:
            raise ValueError(
                f"the draft model has {runner.vocabulary} tokens and the model {sampler.vocab_size}; "
                "give a draft model with the same tokenizer"
            )
        self._runner = runner
        self._sampler = sampler
        self._chunk = chunk
        self._longest = longest
        self._purpose = GUESS if rejection else 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._texts: dict[Answer, DraftSequence] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no answer holds."""
        return len(self._free)

    def propose(self, answers: Sequence[Answer], counts: Sequence[int]) -> list[list[int]]:
        """Drafts, a list an answer; none for those whose text the draft model has not read to its end."""
        self.release_finished()
        wanted = {a: count for a, count in zip(answers, counts, strict=True) if count > 0}
        spare, steps = self._chunk, []
        for answer, count in wanted.items():
            text = self._texts.get(answer) or self._texts.setdefault(answer, DraftSequence(answer))
            text.follow(answer.token_ids)
            if self._reserve(text.shadow, len(answer.token_ids) + count - 1) and spare > 0:
                steps.append((answer, text.scheduled(spare)))
                spare -= steps[-1][1].count
        while steps:
            steps = self._compute(steps, wanted)
        return [self._texts[a].guessed if a in wanted else [] for a in answers]

    def release_finished(self) -> None:
        """Lets go what answers hold that have come to their end."""
        for answer in [a for a in self._texts if a.status is Status.FINISHED]:
            self._free += self._texts.pop(answer).shadow.blocks

    def _compute(
        self, steps: list[tuple[Answer, Scheduled]], wanted: dict[Answer, int]
    ) -> list[tuple[Answer, Scheduled]]:
        """Runs a step of the draft model, and gives the next one."""
        logits = self._runner.execute(Step([scheduled for _, scheduled in steps]))
        for _, scheduled in steps:
            scheduled.answer.computed = scheduled.end
        drawing = [answer for answer, scheduled in steps if scheduled.draws]
        texts = [self._texts[answer] for answer in drawing]
        for text, token in zip(texts, self._draw(logits, drawing), strict=True):
            text.shadow.token_ids.append(token)
        return [
            (answer, text.scheduled(1))
            for answer, text in zip(drawing, texts, strict=True)
            if len(text.guessed) < wanted[answer]
        ]

    def probabilities(self, answer: Answer) -> Tensor | None:
        """What the tokens of the answer's draft were drawn with, ``(k, V)``; None if not needed."""
        found = self._texts[answer].probabilities if answer in self._texts else []
        return torch.stack(found) if found else None

    def _draw(self, logits: Tensor, answers: Sequence[Answer]) -> list[int]:
        prefixes = [self._texts[a].guessed for a in answers]
        if self._purpose and not all(is_greedy(a.params) for a in answers):
            found = self._sampler.probabilities(logits, answers, prefixes, keep=True)
            for answer, row in zip(answers, found, strict=True):
                if not is_greedy(answer.params):
                    self._texts[answer].probabilities.append(row)
        return self._sampler.draw_after(logits, answers, prefixes, self._purpose)

    def _reserve(self, shadow: Answer, length: int) -> bool:
        """Takes blocks for so many positions; says whether there are enough."""
        if self._longest is not None and length > self._longest:
            return False
        missing = -(-length // self._runner.block_size) - len(shadow.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            shadow.blocks.append(self._free.pop())
        return True
