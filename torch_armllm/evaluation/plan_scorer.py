"""Scoring by the plan of a patched model: packed, without padding, common prefixes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_armllm.evaluation.prefix_tree import Node, build_forest
from torch_armllm.evaluation.spans import LogLikelihood, Span, SpanScores, pieces
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.patching.patched_model import servable_model
from torch_armllm.patching.state import is_patched
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import StepInputs

_ROWS = 256
"""Most rows of logits in memory."""


class PlanScorer:
    """Scores spans by a model's plan.

    Args:
        model: a model with a plan.
        most_tokens: most tokens of a step, unless a single span has more.
    """

    def __init__(self, model: ServableModel, most_tokens: int = 1024) -> None:
        self._model = model
        self._pool = BlockPool(model.shape)
        self._most = most_tokens

    @classmethod
    def of(cls, model: Any) -> PlanScorer | None:
        """Returns the scorer of a model; None if it has no plan."""
        servable = servable_model(model) if is_patched(model) else None
        return None if servable is None else cls(servable)

    def serves(self, spans: Sequence[Span]) -> bool:
        """True if all spans fit into the model's maximum length."""
        max_length = self._model.max_length
        return max_length is None or all(len(span.ids) <= max_length for span in spans)

    @torch.no_grad()
    def score(self, spans: Sequence[Span], tick: Callable[[int], object]) -> list[LogLikelihood]:
        """Returns the log-likelihoods of all spans, in order.

        Args:
            spans: the spans.
            tick: called with the number of finished spans.
        """
        scores = SpanScores(spans)

        def visit(nodes: list[tuple[Node, SequenceBlocks | None]]) -> None:
            for batch in _batches(nodes, self._most):
                sequences = [self._begin(parent) for _, parent in batch]
                chunks = [spans[node.sequences[0]].ids[node.start : node.end] for node, _ in batch]
                self._score_batch(batch, scores, self._step(chunks, sequences))
                visit(
                    [
                        (child, sequence)
                        for (node, _), sequence in zip(batch, sequences, strict=True)
                        for child in node.children
                    ]
                )
                for sequence in sequences:
                    sequence.release()
                tick(sum(len(node.sequences) for node, parent in batch if parent is None))

        visit([(node, None) for node in build_forest([span.ids for span in spans])])
        return scores.results()

    @torch.no_grad()
    def rows(self, ids: list[int]) -> Iterator[Tensor]:
        """Yields the logits ``(R, vocab_size)`` of a sequence's positions, some at a time, in order."""
        sequence = SequenceBlocks(self._pool)
        hidden = self._step([ids], [sequence])
        sequence.release()
        for begin, end in pieces(0, len(ids), _ROWS):
            yield self._model.head(hidden[begin:end])

    def _begin(self, parent: SequenceBlocks | None) -> SequenceBlocks:
        return SequenceBlocks(self._pool) if parent is None else parent.fork()

    def _score_batch(
        self, batch: list[tuple[Node, SequenceBlocks | None]], scores: SpanScores, hidden: Tensor
    ) -> None:
        """Computes the logits that spans need, batched over all nodes of a step."""
        ranges: list[tuple[Node, int, int]] = []
        rows: list[Tensor] = []
        at = 0
        for node, _ in batch:
            first = scores.first_needed(node)
            for begin, end in pieces(first, node.end, _ROWS):
                ranges.append((node, begin, end))
                rows.append(hidden[at + begin - node.start : at + end - node.start])
            at += node.end - node.start
        while ranges:
            count, total = 1, len(rows[0])
            while count < len(rows) and total + len(rows[count]) <= _ROWS:
                total += len(rows[count])
                count += 1
            logits = self._model.head(torch.cat(rows[:count]))
            parts = logits.split([len(part) for part in rows[:count]])
            for (node, begin, _), part in zip(ranges[:count], parts, strict=True):
                scores.add_logits(node, begin, part)
            del ranges[:count], rows[:count]

    def _step(self, chunks: list[list[int]], sequences: list[SequenceBlocks]) -> Tensor:
        """Appends chunks to their sequences, and returns the hidden states ``(T, hidden)``."""
        positions = [
            p
            for sequence, chunk in zip(sequences, chunks, strict=True)
            for p in _next_positions(sequence, chunk)
        ]
        inputs = StepInputs.pack(
            self._pool,
            sequences,
            [len(chunk) for chunk in chunks],
            torch.tensor([[token for chunk in chunks for token in chunk]]),
            torch.tensor([positions]) + self._model.first_position,
        )
        return self._model.plan.run(inputs)


def _next_positions(sequence: SequenceBlocks, chunk: list[int]) -> range:
    return range(sequence.length, sequence.length + len(chunk))


def _batches(
    nodes: list[tuple[Node, SequenceBlocks | None]], most: int
) -> Iterator[list[tuple[Node, SequenceBlocks | None]]]:
    batch: list[tuple[Node, SequenceBlocks | None]] = []
    total = 0
    for node, parent in nodes:
        length = node.end - node.start
        if batch and total + length > most:
            yield batch
            batch, total = [], 0
        batch.append((node, parent))
        total += length
    if batch:
        yield batch
