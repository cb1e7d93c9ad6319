"""Scoring by transformers' own forward, which is the baseline of a comparison."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_armllm.evaluation.prefix_tree import Node, build_forest
from torch_armllm.evaluation.spans import LogLikelihood, Span, SpanScores, pieces
from torch_armllm.hf.cache_names import cache_argument, cache_of

_ROWS = 256
_MIN_SHARED = 24
"""Minimum of common tokens for a call of their own: each call reads all weights."""
_BATCH = 512
"""Most tokens per batch, padding included."""


class ModuleScorer:
    """Scores spans by a model's ``forward``; common prefixes are prefilled once.

    Args:
        model: a causal language model whose cache is a `DynamicCache`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache_name = cache_argument(model.forward)
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def can_share_cache(self) -> bool:
        """True if the model's cache can be copied and repeated."""
        cache = cache_of(self._model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True))
        return type(cache) is DynamicCache

    @torch.no_grad()
    def score(self, spans: Sequence[Span], tick: Callable[[int], object]) -> list[LogLikelihood]:
        """Returns the log-likelihoods of all spans, in order; see `PlanScorer.score`."""
        scores = SpanScores(spans)

        def visit(nodes: list[Node], cache: Any) -> None:
            for batch in _batches([node for node in nodes if not node.children]):
                self._prefill(spans, scores, batch, _repeated(cache, len(batch)), use_cache=cache is not None)
                done(batch, cache)
            for node in nodes:
                if node.children:
                    grown = self._prefill(spans, scores, [node], _repeated(cache, 1), use_cache=True)
                    visit(node.children, grown)
                    done([node], cache)

        def done(nodes: list[Node], cache: Any) -> None:
            if cache is None:
                tick(sum(len(node.sequences) for node in nodes))

        visit(build_forest([span.ids for span in spans], _MIN_SHARED), None)
        return scores.results()

    @torch.no_grad()
    def rows(self, ids: list[int]) -> Iterator[Tensor]:
        """Yields the logits of all positions; see `PlanScorer.rows`."""
        logits = self._model(torch.tensor([ids]), use_cache=False).logits[0]
        for begin, end in pieces(0, len(ids), _ROWS):
            yield logits[begin:end]

    def _prefill(
        self, spans: Sequence[Span], scores: SpanScores, batch: list[Node], cache: Any, use_cache: bool
    ) -> Any:
        """Runs nodes that begin at the same position, padded on the right, and returns the cache."""
        max_len = max(node.end - node.start for node in batch)
        ids = torch.zeros(len(batch), max_len, dtype=torch.int64)
        for row, node in zip(ids, batch, strict=True):
            row[: node.end - node.start] = torch.tensor(spans[node.sequences[0]].ids[node.start : node.end])
        start = batch[0].start
        first = min(scores.first_needed(node) for node in batch) if self._can_keep else start
        keep = {"logits_to_keep": max(start + max_len - first, 1)} if self._can_keep else {}
        out = self._model(ids, use_cache=use_cache, **{self._cache_name: cache}, **keep)
        for row, node in zip(out.logits, batch, strict=True):
            for begin, end in pieces(scores.first_needed(node), node.end, _ROWS):
                scores.add_logits(node, begin, row[begin - first : end - first])
        return cache_of(out)


def _batches(nodes: list[Node]) -> Iterator[list[Node]]:
    """Yields batches of nodes of similar length, so that little is padded."""
    batch: list[Node] = []
    for node in sorted(nodes, key=lambda node: node.start - node.end):
        if batch and (len(batch) + 1) * (batch[0].end - batch[0].start) > _BATCH:
            yield batch
            batch = []
        batch.append(node)
    if batch:
        yield batch


def _repeated(cache: Any, count: int) -> Any:
    """Returns a copy of a one-row cache with ``count`` rows."""
    if cache is None:
        return None
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(count)
    return repeated
