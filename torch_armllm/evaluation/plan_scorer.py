"""Logits of texts by the plan of a patched model: packed, without padding, common beginnings once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_armllm.engine.execution.lm_head import Head
from torch_armllm.evaluation.prefix_tree import Node, grow
from torch_armllm.evaluation.spans import Answer, Scores, Text, pieces
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import Sequence as Place
from torch_armllm.patching.forward import PatchedForward
from torch_armllm.patching.state import is_patched, patched_forward
from torch_armllm.plan.step import StepInputs

_ROWS = 256
"""Logits that are there at a time."""


class PlanScorer:
    """Scores texts by a model's plan.

    Args:
        model: a patched model.
        forward: its body's.
        most_tokens: of a step, unless a text alone has more.
    """

    def __init__(self, model: Any, forward: PatchedForward, most_tokens: int = 1024) -> None:
        self._forward = forward
        self._head = Head(model, forward)
        self._pool = BlockPool(forward.shape)
        self._most = most_tokens

    @classmethod
    def of(cls, model: Any) -> PlanScorer | None:
        """A model's scorer; None where it has no plan."""
        forward = patched_forward(model) if is_patched(model) else None
        return None if forward is None else cls(model, forward)

    def serves(self, texts: Sequence[Text]) -> bool:
        """Whether the plan can read all of the texts."""
        longest = self._forward.longest
        return longest is None or all(len(text.ids) <= longest for text in texts)

    @torch.no_grad()
    def score(self, texts: Sequence[Text], tick: Callable[[int], object]) -> list[Answer]:
        """Answers of all texts, in their order.

        Args:
            texts: to score.
            tick: is told how many texts are done.
        """
        scores = Scores(texts)

        def visit(nodes: list[tuple[Node, Place | None]]) -> None:
            for batch in _batches(nodes, self._most):
                places = [self._begin(parent) for _, parent in batch]
                spans = [texts[node.texts[0]].ids[node.start : node.end] for node, _ in batch]
                self._read(batch, scores, self._step(spans, places))
                visit(
                    [
                        (child, place)
                        for (node, _), place in zip(batch, places, strict=True)
                        for child in node.children
                    ]
                )
                for place in places:
                    place.release()
                tick(sum(len(node.texts) for node, parent in batch if parent is None))

        visit([(node, None) for node in grow([text.ids for text in texts])])
        return scores.answers()

    @torch.no_grad()
    def rows(self, ids: list[int]) -> Iterator[Tensor]:
        """Logits ``(R, vocabulary)`` of a text's positions, some at a time, in order."""
        place = Place(self._pool)
        hidden = self._step([ids], [place])
        place.release()
        for begin, end in pieces(0, len(ids), _ROWS):
            yield self._head(hidden[begin:end])

    def _begin(self, parent: Place | None) -> Place:
        return Place(self._pool) if parent is None else parent.fork()

    def _read(self, batch: list[tuple[Node, Place | None]], scores: Scores, hidden: Tensor) -> None:
        """Takes the logits that texts ask for, of all nodes of a step at once."""
        wanted: list[tuple[Node, int, int]] = []
        rows: list[Tensor] = []
        at = 0
        for node, _ in batch:
            first = scores.wanted(node)
            for begin, end in pieces(first, node.end, _ROWS):
                wanted.append((node, begin, end))
                rows.append(hidden[at + begin - node.start : at + end - node.start])
            at += node.end - node.start
        while wanted:
            count, total = 1, len(rows[0])
            while count < len(rows) and total + len(rows[count]) <= _ROWS:
                total += len(rows[count])
                count += 1
            logits = self._head(torch.cat(rows[:count]))
            parts = logits.split([len(part) for part in rows[:count]])
            for (node, begin, _), part in zip(wanted[:count], parts, strict=True):
                scores.take(node, begin, part)
            del wanted[:count], rows[:count]

    def _step(self, spans: list[list[int]], places: list[Place]) -> Tensor:
        """Hidden states ``(T, hidden)`` of the tokens of all spans, which go on where their places end."""
        positions = [p for place, span in zip(places, spans, strict=True) for p in _behind(place, span)]
        slots = [s for place, span in zip(places, spans, strict=True) for s in place.append(len(span))]
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + len(span))
        lengths = [place.length for place in places]
        most = max(len(place.blocks) for place in places)
        table = [place.blocks + [0] * (most - len(place.blocks)) for place in places]
        return self._forward.plan.run(
            StepInputs(
                input_ids=torch.tensor([[token for span in spans for token in span]]),
                position_ids=torch.tensor([positions]) + self._forward.first_position,
                slots=torch.tensor(slots),
                block_table=torch.tensor(table, dtype=torch.int32),
                query_start=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.tensor(lengths, dtype=torch.int32),
                max_seq_len=max(lengths),
                cache=self._pool.cache,
            )
        )


def _behind(place: Place, span: list[int]) -> range:
    return range(place.length, place.length + len(span))


def _batches(nodes: list[tuple[Node, Place | None]], most: int) -> Iterator[list[tuple[Node, Place | None]]]:
    batch: list[tuple[Node, Place | None]] = []
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
