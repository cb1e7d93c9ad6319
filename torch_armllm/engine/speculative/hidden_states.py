"""Drafts by a layer that reads the hidden states of the model's own steps."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling.batch import is_greedy
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.speculative.draft_layer import DraftLayer
from torch_armllm.engine.speculative.rejection import DRAFT
from torch_armllm.engine.step import Scheduled, Step
from torch_armllm.kv_cache.block_copies import copy_blocks


def spare_blocks(block_size: int, max_draft_tokens: int, max_num_seqs: int) -> int:
    """Returns the blocks that draft tokens need beside those of the model's cache."""
    return max_num_seqs * -(-max_draft_tokens // block_size)


class _Drafting(NamedTuple):
    sequence: Sequence
    shadow: Sequence
    length: int
    draft: list[int]


class HiddenStateProposer:
    """Drafts tokens with a draft layer: multi-token prediction, or EAGLE-3.

    The layer's token at a position is the model's next one, beside the model's hidden state there.  So it
    computes each position of a step right after the model did, prompts included, and needs no hidden state
    of an earlier step.  Its keys and values lie in the blocks of the model's cache, by the same numbers:
    where a block is shared, copied, swapped or found by the prefix cache, they are too.  Only draft tokens
    beyond a sequence's own blocks have others, whose content lasts for one call.

    Args:
        layer: the draft layer.
        num_blocks: blocks of the model's KV cache.
        swap_blocks: blocks of its swap memory.
        sampler: the engine's.
        max_draft_tokens: most tokens of a draft.
        max_num_seqs: most sequences of a step.
        max_length: maximum context length; None: unlimited.
        rejection: samples for rejection sampling at temperatures above 0.
    """

    chooses_lengths = False

    def __init__(
        self,
        layer: DraftLayer,
        num_blocks: int,
        swap_blocks: int,
        sampler: Sampler,
        max_draft_tokens: int,
        max_num_seqs: int,
        max_length: int | None = None,
        rejection: bool = False,
    ) -> None:
        self._layer = layer
        self._sampler = sampler
        self._purpose = DRAFT if rejection else 0
        self._max_length = max_length
        self._first_spare = num_blocks
        spare = spare_blocks(layer.shape.block_size, max_draft_tokens, max_num_seqs)
        self._spare_each = spare // max_num_seqs
        blocks = num_blocks + spare
        self.cache = layer.shape.tensors(blocks)
        self._swap = layer.shape.tensors(swap_blocks) if swap_blocks else None
        self._builder = StepBuilder(self.cache, layer.shape.block_size)
        self._shadows: WeakKeyDictionary[Sequence, Sequence] = WeakKeyDictionary()
        self._probabilities: WeakKeyDictionary[Sequence, list[Tensor]] = WeakKeyDictionary()
        self._step: Step | None = None
        self._hidden = torch.empty(0)

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
        copy_blocks(self.cache, self._swap, step.swaps_out, step.swaps_in, step.copies)
        lengths = dict(zip(sequences, counts, strict=True))
        scheduled: list[Scheduled] = []
        rows: list[range] = []
        drafting: list[_Drafting] = []
        last_rows: list[int] = []
        at = row = 0
        for sequence, start, count in step.scheduled:
            computed = min(count, sequence.computed - start)  # rejected draft tokens do not count
            if sequence.status is Status.RUNNING and computed > 0:
                shadow = self._follow(sequence, start)
                scheduled.append(Scheduled(shadow, start, computed))
                rows.append(range(at, at + computed))
                row += computed
                length = self._fit(len(sequence.token_ids), lengths.get(sequence, 0))
                self._reserve(sequence, shadow, length, len(drafting))
                if length:
                    drafting.append(_Drafting(sequence, shadow, length, []))
                    last_rows.append(row - 1)
            at += count
        if not scheduled:
            return [[] for _ in sequences]
        chosen = [number for part in rows for number in part]
        hidden = self._hidden if len(chosen) == at else self._hidden[chosen]
        hidden = self._compute(scheduled, self._layer.given(hidden))
        self._draft(drafting, hidden[last_rows])
        drafts = {each.sequence: each.draft for each in drafting}
        return [drafts.get(sequence, []) for sequence in sequences]

    def _draft(self, drafting: list[_Drafting], hidden: Tensor) -> None:
        """Draws the drafts, each token from the hidden states that the layer computed with the last one."""
        for each in drafting:
            self._probabilities[each.sequence] = []
        while drafting:
            tokens = self._draw(self._layer.head(hidden), drafting)
            for each, token in zip(drafting, tokens, strict=True):
                each.draft.append(token)
            going = [number for number, each in enumerate(drafting) if len(each.draft) < each.length]
            if not going:
                return
            hidden = hidden if len(going) == len(drafting) else hidden[going]
            drafting = [drafting[number] for number in going]
            for each in drafting:
                each.shadow.token_ids.append(each.draft[-1])
            scheduled = [Scheduled(each.shadow, len(each.shadow.token_ids) - 1, 1) for each in drafting]
            hidden = self._compute(scheduled, hidden)

    def _draw(self, logits: Tensor, drafting: GenericSequence[_Drafting]) -> list[int]:
        sequences = [each.sequence for each in drafting]
        prefixes = [each.draft for each in drafting]
        if self._purpose and not all(is_greedy(sequence.params) for sequence in sequences):
            distributions = self._sampler.probabilities(logits, sequences, prefixes, keep=True)
            for sequence, distribution in zip(sequences, distributions, strict=True):
                if not is_greedy(sequence.params):
                    self._probabilities[sequence].append(distribution)
        return self._sampler.draw_after(logits, sequences, prefixes, self._purpose)

    def _compute(self, scheduled: list[Scheduled], given: Tensor) -> Tensor:
        inputs, _ = self._builder.build(Step(scheduled))
        inputs.given = given.contiguous()
        return self._layer.plan.run(inputs)

    def _follow(self, sequence: Sequence, start: int) -> Sequence:
        """Returns the sequence in the layer's steps; its tokens are the model's from the second one on."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            request = sequence.request
            shadow = Request(request.request_id, request.prompt_token_ids, SamplingParams(), 0).sequences[0]
            shadow.token_ids = sequence.token_ids[1:]
            self._shadows[sequence] = shadow
        elif len(shadow.token_ids) < start:
            shadow.token_ids[:] = sequence.token_ids[1:]
        else:
            shadow.token_ids[start:] = sequence.token_ids[start + 1 :]
        return shadow

    def _fit(self, length: int, count: int) -> int:
        """Returns how many of ``count`` tokens are drafted, within the maximum context length."""
        return count if self._max_length is None else max(0, min(count, self._max_length - length))

    def _reserve(self, sequence: Sequence, shadow: Sequence, count: int, number: int) -> None:
        """Sets the blocks of a sequence in the layer's steps.

        Args:
            sequence: the model's.
            shadow: the layer's.
            count: draft tokens; the layer computes all but the last one.
            number: of the sequence among those that draft.
        """
        size = self._layer.shape.block_size
        needed = -(-(len(sequence.token_ids) - 1 + max(0, count - 1)) // size)
        first = self._first_spare + number * self._spare_each
        spare = range(first, first + max(0, needed - len(sequence.blocks)))
        assert len(spare) <= self._spare_each
        shadow.blocks[:] = [*sequence.blocks[:needed], *spare]
