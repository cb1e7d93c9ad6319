"""Logits of texts by transformers' own forward, which is what a comparison begins with."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_armllm.evaluation.prefix_tree import Node, grow
from torch_armllm.evaluation.spans import Answer, Scores, Text, pieces

_ROWS = 256
_LEAST = 24
"""Common tokens that are worth a call of their own, which reads all weights."""
_BATCH = 512
"""Tokens of texts that are read together, padding among them."""


class ModuleScorer:
    """Scores texts by a model's ``forward``; common beginnings are read once, into transformers' own cache.

    Args:
        model: a causal language model whose cache is a `DynamicCache`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def of_cache(self) -> bool:
        """Whether the model's cache can be copied and repeated."""
        cache = self._model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
        return type(cache) is DynamicCache

    @torch.no_grad()
    def score(self, texts: Sequence[Text], tick: Callable[[int], object]) -> list[Answer]:
        """Answers of all texts, in their order; see `PlanScorer.score`."""
        scores = Scores(texts)

        def visit(nodes: list[Node], cache: Any) -> None:
            for batch in _batches([node for node in nodes if not node.children]):
                self._read(texts, scores, batch, _repeated(cache, len(batch)), use_cache=cache is not None)
                done(batch, cache)
            for node in nodes:
                if node.children:
                    grown = self._read(texts, scores, [node], _repeated(cache, 1), use_cache=True)
                    visit(node.children, grown)
                    done([node], cache)

        def done(nodes: list[Node], cache: Any) -> None:
            if cache is None:
                tick(sum(len(node.texts) for node in nodes))

        visit(grow([text.ids for text in texts], _LEAST), None)
        return scores.answers()

    @torch.no_grad()
    def rows(self, ids: list[int]) -> Iterator[Tensor]:
        """Logits of a text's positions; see `PlanScorer.rows`."""
        logits = self._model(torch.tensor([ids]), use_cache=False).logits[0]
        for begin, end in pieces(0, len(ids), _ROWS):
            yield logits[begin:end]

    def _read(
        self, texts: Sequence[Text], scores: Scores, batch: list[Node], cache: Any, use_cache: bool
    ) -> Any:
        """Runs nodes that begin at one position, padded on the right, and returns the cache."""
        longest = max(node.end - node.start for node in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, node in zip(ids, batch, strict=True):
            row[: node.end - node.start] = torch.tensor(texts[node.texts[0]].ids[node.start : node.end])
        start = batch[0].start
        first = min(scores.wanted(node) for node in batch) if self._can_keep else start
        keep = {"logits_to_keep": max(start + longest - first, 1)} if self._can_keep else {}
        out = self._model(ids, past_key_values=cache, use_cache=use_cache, **keep)
        for row, node in zip(out.logits, batch, strict=True):
            for begin, end in pieces(scores.wanted(node), node.end, _ROWS):
                scores.take(node, begin, row[begin - first : end - first])
        return out.past_key_values


def _batches(nodes: list[Node]) -> Iterator[list[Node]]:
    """Nodes of about the same length, so that little is padded."""
    batch: list[Node] = []
    for node in sorted(nodes, key=lambda node: node.start - node.end):
        if batch and (len(batch) + 1) * (batch[0].end - batch[0].start) > _BATCH:
            yield batch
            batch = []
        batch.append(node)
    if batch:
        yield batch


def _repeated(cache: Any, count: int) -> Any:
    """A copy of a cache of one row, with ``count`` rows."""
    if cache is None:
        return None
    made = copy.deepcopy(cache)
    made.batch_repeat_interleave(count)
    return made
