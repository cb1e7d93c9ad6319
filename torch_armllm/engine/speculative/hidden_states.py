"""Drafts by layers that read the hidden states of the model's own steps."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling.batch import is_greedy
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.engine.speculative.config import SpeculativeConfig
from torch_armllm.engine.speculative.draft_layer import DraftLayers
from torch_armllm.engine.speculative.layer_runner import LayerRunner
from torch_armllm.engine.speculative.rejection import DRAFT
from torch_armllm.kv_cache.budget import KvMemory


def spare_blocks(block_size: int, max_draft_tokens: int, max_num_seqs: int) -> int:
    """Returns the blocks that draft tokens need beside those of the model's cache."""
    return max_num_seqs * -(-max_draft_tokens // block_size)


@dataclass
class _Part:
    """A sequence's positions that a draft layer computes, and its draft.

    Attributes:
        sequence: the model's.
        start: first position.
        end: position after the last one.
        length: tokens to draft.
        blocks: of the layers' caches.
        draft: the tokens drafted so far.
    """

    sequence: Sequence
    start: int
    end: int
    length: int
    blocks: list[int]
    draft: list[int] = field(default_factory=list)


class HiddenStateProposer:
    """Drafts tokens with draft layers: multi-token prediction, or EAGLE-3.

    The first layer's token at a position is the model's next one, beside the model's hidden state there.  So
    it computes each position of a step right after the model did, prompts included, and needs no hidden state
    of an earlier step.  Keys and values lie in the blocks of the model's cache, by the same numbers: where a
    block is shared, copied, swapped or found by the prefix cache, they are too.  Only draft tokens beyond a
    sequence's own blocks have others, whose content lasts for one call.

    A further layer's token is one more token ahead, beside the hidden state of the layer before.  The token
    of its last positions is drafted; the next call computes them again with the one that was sampled.

    Args:
        layers: the draft layers.
        memory: of the model's KV cache.
        sampler: the engine's.
        config: settings.
        max_num_seqs: most sequences of a step.
        max_length: maximum context length; None: unlimited.

    Attributes:
        runners: of the layers.
    """

    chooses_lengths = False

    def __init__(
        self,
        layers: DraftLayers,
        memory: KvMemory,
        sampler: Sampler,
        config: SpeculativeConfig,
        max_num_seqs: int,
        max_length: int | None = None,
    ) -> None:
        self._given = layers.given
        self._sampler = sampler
        self._purpose = DRAFT if config.draft_sampling == "rejection" else 0
        self._max_length = max_length
        self._block_size = layers.block_size
        self._first_spare = memory.num_blocks
        spare = spare_blocks(layers.block_size, config.num_speculative_tokens, max_num_seqs)
        self._spare_each = spare // max_num_seqs
        blocks = memory.num_blocks + spare, memory.swap_blocks
        self.runners = [LayerRunner(layer, *blocks, sampler.vocab_size) for layer in layers.layers]
        self._shadows: list[WeakKeyDictionary[Sequence, Sequence]] = [
            WeakKeyDictionary() for _ in self.runners
        ]
        # of each layer but the first: the position before the next step, and the row that it is given there
        self._earlier: list[WeakKeyDictionary[Sequence, tuple[int, Tensor]]] = [
            WeakKeyDictionary() for _ in self.runners
        ]
        self._probabilities: WeakKeyDictionary[Sequence, list[Tensor]] = WeakKeyDictionary()
        self._step: Step | None = None

    def record_step(self, sequences: int, drafted: int, seconds: float) -> None:
        """Does nothing: lengths do not depend on times."""

    def probabilities(self, sequence: Sequence) -> Tensor | None:
        """Returns the distributions ``(k, V)`` from which a draft was sampled; None if not needed."""
        distributions = self._probabilities.get(sequence)
        return torch.stack(distributions) if distributions else None

    def read(self, step: Step, hidden: Tensor) -> None:
        """Takes the model's hidden states ``(T, columns)`` of a step for the next call of `propose`."""
        self._step, self._hidden = step, hidden

    @torch.no_grad()
    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Computes the positions of the step that was read, and returns one draft per sequence.

        Sequences that the step did not compute itself get no draft: those forked from one that it did.
        """
        step, self._step = self._step, None
        assert step is not None
        for runner in self.runners:
            runner.copy_blocks(step)
        lengths = dict(zip(sequences, counts, strict=True))
        parts: list[_Part] = []
        rows: list[range] = []
        at = num_drafting = 0
        for sequence, start, count in step.scheduled:
            computed = min(count, sequence.computed - start)  # rejected draft tokens do not count
            if sequence.status is Status.RUNNING and computed > 0:
                length = self._fit(len(sequence.token_ids), lengths.get(sequence, 0))
                blocks = self._blocks(sequence, length, num_drafting)
                parts.append(_Part(sequence, start, start + computed, length, blocks))
                rows.append(range(at, at + computed))
                num_drafting += length > 0
            at += count
        if not parts:
            return [[] for _ in sequences]
        chosen = [number for part in rows for number in part]
        hidden = self._hidden if len(chosen) == at else self._hidden[chosen]
        self._draft(parts, self._given(hidden))
        drafts = {part.sequence: part.draft for part in parts}
        return [drafts.get(sequence, []) for sequence in sequences]

    def _draft(self, parts: list[_Part], given: Tensor) -> None:
        """Draws the drafts: each layer its own token, and the last one those that follow."""
        for part in parts:
            if part.length:
                self._probabilities[part.sequence] = []
        for number, runner in enumerate(self.runners):
            if number:
                given = self._with_earlier(number, parts, given)
            scheduled, last_rows, end = [], [], 0
            for part in parts:
                count = part.end - part.start
                scheduled.append(Scheduled(self._follow(number, part), part.start, count))
                end += count
                if part.length > number:
                    last_rows.append(end - 1)
            drafting = [part for part in parts if part.length > number]
            given = self._compute(runner, scheduled, given, last_rows, drafting)
        rows, shadows = last_rows, self._shadows[-1]
        while True:
            going = [number for number, part in enumerate(drafting) if len(part.draft) < part.length]
            if not going:
                return
            given = given[[rows[number] for number in going]] if len(going) < len(given) else given
            drafting = [drafting[number] for number in going]
            rows = list(range(len(drafting)))
            scheduled = []
            for part in drafting:
                shadow = shadows[part.sequence]
                shadow.token_ids.append(part.draft[-1])
                scheduled.append(Scheduled(shadow, len(shadow.token_ids) - 1, 1))
            given = self._compute(runner, scheduled, given, rows, drafting)

    def _compute(
        self,
        runner: LayerRunner,
        scheduled: list[Scheduled],
        given: Tensor,
        rows: list[int],
        drafting: list[_Part],
    ) -> Tensor:
        """Computes a step of a layer, and draws a token after each of its rows ``rows``.

        Returns:
            The rows that the step of the next token is given, of all tokens.
        """
        sequences = [part.sequence for part in drafting]
        best = bool(rows) and self._sampler.takes_best(sequences)
        following, logits, tokens = runner.compute(scheduled, given, rows, best)
        if tokens is None and logits is not None:
            tokens = self._draw(logits, sequences, [part.draft for part in drafting])
        for part, token in zip(drafting, tokens or (), strict=True):
            part.draft.append(token)
        return following

    def _draw(self, logits: Tensor, sequences: list[Sequence], prefixes: list[list[int]]) -> list[int]:
        if self._purpose and not all(is_greedy(sequence.params) for sequence in sequences):
            distributions = self._sampler.probabilities(logits, sequences, prefixes, keep=True)
            for sequence, distribution in zip(sequences, distributions, strict=True):
                if not is_greedy(sequence.params):
                    self._probabilities[sequence].append(distribution)
        return self._sampler.draw_after(logits, sequences, prefixes, self._purpose)

    def _with_earlier(self, number: int, parts: list[_Part], rows: Tensor) -> Tensor:
        """Returns the rows that a further layer is given, and lets parts begin where they do.

        They are the rows of the layer before.  A row of the last step comes before them: its position had a
        drafted token then.
        """
        earlier, given, at = self._earlier[number], [], 0
        for part in parts:
            own = rows[at : at + part.end - part.start]
            at += len(own)
            kept = part.end - number - part.start
            position, row = earlier.pop(part.sequence, (-1, own))
            if kept >= 0:
                earlier[part.sequence] = part.end - number, own[kept : kept + 1].clone()
            if 0 <= position == part.start - 1:
                given.append(row)
                part.start = position
            given.append(own)
        return torch.cat(given)

    def _follow(self, number: int, part: _Part) -> Sequence:
        """Returns a part's sequence in a layer's steps; its tokens are the model's later ones."""
        sequence, shadows, shift = part.sequence, self._shadows[number], number + 1
        shadow = shadows.get(sequence)
        if shadow is None:
            request = sequence.request
            shadow = Request(request.request_id, request.prompt_token_ids, SamplingParams(), 0).sequences[0]
            shadow.token_ids = []
            shadows[sequence] = shadow
        tokens = shadow.token_ids
        start = min(part.start, len(tokens))
        tokens[start:] = sequence.token_ids[start + shift :]
        if number:
            tokens += part.draft[max(0, start + shift - len(sequence.token_ids)) :]
            # positions of tokens that no layer drafted are computed again before anything reads them
            tokens += sequence.token_ids[-1:] * (part.end - len(tokens))
        shadow.blocks[:] = part.blocks
        return shadow

    def _fit(self, length: int, count: int) -> int:
        """Returns how many of ``count`` tokens are drafted, within the maximum context length."""
        return count if self._max_length is None else max(0, min(count, self._max_length - length))

    def _blocks(self, sequence: Sequence, count: int, number: int) -> list[int]:
        """Returns the blocks of a sequence in the layers' steps.

        Args:
            sequence: the model's.
            count: draft tokens; the layers compute all but the last one.
            number: of the sequence among those that draft.
        """
        needed = -(-(len(sequence.token_ids) - 1 + max(0, count - 1)) // self._block_size)
        first = self._first_spare + number * self._spare_each
        spare = range(first, first + max(0, needed - len(sequence.blocks)))
        assert len(spare) <= self._spare_each
        return [*sequence.blocks[:needed], *spare]
