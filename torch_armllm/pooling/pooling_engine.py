"""The engine of a pooling model: requests in, batches by a budget of tokens, results out."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.engine_protocol import Engine
from torch_armllm.engine.errors import StepFailedError
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.engine.outputs import RequestMetrics
from torch_armllm.engine.reports.stats import EngineStats, Gauges
from torch_armllm.pooling.inputs import InputBuilder
from torch_armllm.pooling.loaded_pooling import LoadedPooling
from torch_armllm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from torch_armllm.pooling.pooling_model import PoolingInput
from torch_armllm.system.panics import PANICS_AS_ERRORS

_LOOKED_AT = 4
"""Waiting requests that may fill up a batch, in multiples of its most sequences."""
_MAX_LENGTH = 1 << 20
"""Most tokens of a text where neither the model nor the user has a limit."""


class PoolingRequest(NamedTuple):
    """An input as it is submitted to a pooling engine.

    Attributes:
        request_id: unique among running requests.
        input: with its parameters.
        priority: lower values run first.
    """

    request_id: str
    input: PoolingInput
    priority: int = 0


@dataclass(eq=False)
class _Request:
    request_id: str
    input: PoolingInput
    priority: int
    number: int
    metrics: RequestMetrics


class PoolingEngine(Engine[PoolingRequest]):
    """Computes pooling requests in batches; `EngineThread` or `LLM` takes its steps.

    A batch has the request that has waited longest, and those after it that fit: padded to the longest, its
    texts have at most ``max_num_batched_tokens`` tokens, or it is one text.

    Args:
        loaded: the model and its tokenizer.
        config: ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``, ``threads`` and
            ``pin_threads`` apply; the other settings are of generating models.

    Attributes:
        inputs: builds the inputs of requests.
        max_num_seqs: most texts of a batch.
        model: the model.
        stats: counts of requests and tokens.

    Raises:
        ValueError: ``max_model_len`` is more than the model takes.
    """

    def __init__(self, loaded: LoadedPooling, config: EngineConfig) -> None:
        self.model = loaded.model
        self.inputs = InputBuilder(loaded, _max_model_len(loaded, config))
        self.max_num_seqs = config.max_num_seqs
        self.stats = EngineStats(self._gauges, log=not config.disable_log_stats)
        self._most_tokens = config.max_num_batched_tokens
        self._team = ThreadTeam(choose_threads(config.threads, config.pin_threads))
        self._waiting: OrderedDict[str, _Request] = OrderedDict()
        self._numbers = itertools.count()
        self._running = 0

    @property
    def max_model_len(self) -> int:
        """Most tokens of an input."""
        return self.inputs.max_model_len

    def add_request(self, new: PoolingRequest) -> None:
        """Submits a request.

        Raises:
            ValueError: the id is in use.
        """
        request_id, prompt, priority = new
        if request_id in self._waiting:
            raise ValueError(f"a request with the id {request_id!r} is running; give another id")
        arrival = RequestMetrics(time.monotonic())
        added = _Request(request_id, prompt, priority, next(self._numbers), arrival)
        last = next(reversed(self._waiting.values()), added)
        self._waiting[request_id] = added
        if last.priority > priority:
            ordered = sorted(self._waiting.values(), key=lambda each: (each.priority, each.number))
            self._waiting = OrderedDict((each.request_id, each) for each in ordered)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Ends requests that wait; there are no outputs of them."""
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._waiting.pop(name, None)
        return []

    def has_unfinished_requests(self) -> bool:
        """True if there is anything to compute."""
        return bool(self._waiting)

    def step(self) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Computes a batch, and returns its results.

        Raises:
            StepFailedError: the batch failed, and its requests have ended.
        """
        batch = self._take()
        self._running = len(batch)
        began = time.monotonic()
        try:
            with PANICS_AS_ERRORS, self._team.at_work():
                results = self.model.compute([each.input for each in batch])
        except Exception as error:  # of any kind: other requests go on
            raise StepFailedError([each.request_id for each in batch], error) from error
        finally:
            self._running = 0
        now = time.monotonic()
        self.stats.totals.steps += 1
        self.stats.totals.prompt_tokens += sum(len(each.input.token_ids) for each in batch)
        for each in batch:
            each.metrics.scheduled_time = began
            each.metrics.first_token_time = each.metrics.finished_time = now
        return [
            PoolingRequestOutput(
                each.request_id, PoolingOutput(data), each.input.token_ids, metrics=each.metrics
            )
            for each, data in zip(batch, results, strict=True)
        ]

    def _take(self) -> list[_Request]:
        """Removes the next batch from the waiting requests."""
        most = self.max_num_seqs if self.model.pads else 1
        batch: list[_Request] = []
        longest = 0
        for each in list(itertools.islice(self._waiting.values(), _LOOKED_AT * most)):
            length = max(longest, len(each.input.token_ids))
            if not batch or (len(batch) < most and length * (len(batch) + 1) <= self._most_tokens):
                batch.append(each)
                longest = length
                del self._waiting[each.request_id]
        return batch

    def _gauges(self) -> Gauges:
        return Gauges(self._running, len(self._waiting), 0.0, 0.0)


def _max_model_len(loaded: LoadedPooling, config: EngineConfig) -> int:
    wanted, most = config.max_model_len, loaded.max_tokens
    if wanted is not None and most is not None and wanted > most:
        raise ValueError(
            f"max_model_len is {wanted}, and the model takes texts of at most {most} tokens: "
            "give at most that"
        )
    return wanted or most or _MAX_LENGTH
