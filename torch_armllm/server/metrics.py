"""Prometheus metrics, under vLLM's names where they mean the same, so that its dashboards work."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.reports.metrics import (
    COUNTERS,
    DISK_COUNTERS,
    DISK_GAUGES,
    EXPERT_COUNTERS,
    EXPERT_GAUGES,
    GAUGES,
)
from torch_armllm.engine.reports.stats import EngineStats
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.pooling.outputs import PoolingRequestOutput

RESTART_OUTCOMES = ("success", "error")

AllStats = Callable[[], Sequence[EngineStats]]
"""Returns the statistics of each engine of a model."""

_LABEL = "model_name"
_ENGINE_LABELS = [_LABEL, "engine"]
"""Labels of what an engine counts itself: ``engine`` is its number, which tells replicas apart."""
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN_BUCKETS = tuple(size * 10**power for power in range(5) for size in (1, 2, 5))
_N_BUCKETS = (1, 2, 5, 10, 20)
_SPEED_BUCKETS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Time between outputs of a stream, per token.", _ITL_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _ITL_BUCKETS),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", _LATENCY_BUCKETS),
    "request_queue_time_seconds": ("Time from a request's arrival to its first step.", _LATENCY_BUCKETS),
    "request_prefill_time_seconds": ("Time from the first step to the first token.", _LATENCY_BUCKETS),
    "request_decode_time_seconds": ("Time from the first token to the end.", _LATENCY_BUCKETS),
    "request_inference_time_seconds": ("Time from the first step to the end.", _LATENCY_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKEN_BUCKETS),
    "request_generation_tokens": ("Output tokens of a request.", _TOKEN_BUCKETS),
    "request_params_n": ("Parameter n of a request.", _N_BUCKETS),
    "request_params_max_tokens": ("Parameter max_tokens of a request.", _TOKEN_BUCKETS),
}


class ServerMetrics:
    """Metrics of a server, labeled by model name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engines: dict[str, AllStats] = {}
        self.finish_reasons: defaultdict[str, set[str]] = defaultdict(set)
        self.registry.register(_EngineCollector(self.engines))
        self.finished = Counter(
            "vllm:request_success",
            "Finished requests by finish reason.",
            [_LABEL, "finished_reason"],
            registry=self.registry,
        )
        self.prefix_cache = {
            name: Counter(f"vllm:prefix_cache_{name}", text, [_LABEL], registry=self.registry)
            for name, text in (
                ("queries", "Prompt tokens looked up in the prefix cache."),
                ("hits", "Prompt tokens found in the prefix cache."),
            )
        }
        self.restarts = Counter(
            "armllm:engine_restarts",
            "Engines rebuilt after a failure; outcome is success or error.",
            [_LABEL, "outcome"],
            registry=self.registry,
        )
        self.responses = Counter(
            "armllm:http_responses",
            "Responses by the path of the route, and their status; other paths are counted as other.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.audio_seconds = Counter(
            "armllm:audio_seconds",
            "Seconds of audio that were transcribed or translated.",
            [_LABEL],
            registry=self.registry,
        )
        self.audio_speed = Histogram(
            "armllm:audio_real_time_speed",
            "Seconds of audio that a second of computing transcribes: the inverse of the real-time factor.",
            [_LABEL],
            registry=self.registry,
            buckets=_SPEED_BUCKETS,
        )
        self.histograms = {
            name: Histogram(f"vllm:{name}", text, [_LABEL], registry=self.registry, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def for_model(self, name: str, stats: AllStats) -> ModelMetrics:
        """Returns the metrics of a model; a model of the same name continues the previous counts.

        Args:
            name: the model's name.
            stats: returns the statistics of the model's engine, or of each replica.
        """
        self.engines[name] = stats
        for outcome in RESTART_OUTCOMES:
            self.restarts.labels(name, outcome)
        return ModelMetrics(self, name, stats)

    def count_response(self, endpoint: str, status: int) -> None:
        """Counts a response."""
        self.responses.labels(endpoint, str(status)).inc()

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))


class ModelMetrics:
    """Metrics of a served model; see `ServerMetrics.for_model`."""

    def __init__(self, metrics: ServerMetrics, name: str, stats: AllStats) -> None:
        self._metrics = metrics
        self._name = name
        self._stats: AllStats | None = stats
        self._prefix_cache = {key: counter.labels(name) for key, counter in metrics.prefix_cache.items()}
        self._histograms = {key: histogram.labels(name) for key, histogram in metrics.histograms.items()}

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        self._histograms[name].observe(value)

    def count_finished(self, reason: str) -> None:
        """Counts a request that ended."""
        self._metrics.finish_reasons[self._name].add(reason)
        self._metrics.finished.labels(self._name, reason).inc()

    def count_prompt(self, tokens: int, cached: int) -> None:
        """Counts a prompt's tokens, and those of them that the prefix cache held."""
        self._prefix_cache["queries"].inc(tokens)
        self._prefix_cache["hits"].inc(cached)

    def count_audio(self, seconds: float, computing: float) -> None:
        """Counts seconds of audio, and the seconds of computing that they took."""
        self._metrics.audio_seconds.labels(self._name).inc(seconds)
        self._metrics.audio_speed.labels(self._name).observe(seconds / computing)

    def detach(self) -> bool:
        """Forgets the engine, and keeps the counts; false if another model has taken its name."""
        stats, self._stats = self._stats, None  # it holds the engine
        if stats is None or self._metrics.engines.get(self._name) is not stats:
            return False
        del self._metrics.engines[self._name]
        return True

    def close(self) -> None:
        """Removes the model's metrics, unless another model has taken its name."""
        metrics = self._metrics
        if not self.detach():
            return
        for outcome in RESTART_OUTCOMES:
            metrics.restarts.remove(self._name, outcome)
        for metric in (*metrics.prefix_cache.values(), *metrics.histograms.values()):
            metric.remove(self._name)
        for reason in metrics.finish_reasons.pop(self._name, ()):
            metrics.finished.remove(self._name, reason)


class RequestMetrics:
    """Collects the metrics of one request; call `close` when the request has ended or was aborted.

    Args:
        metrics: metrics of the model.
        params: parameters of the request.
    """

    def __init__(self, metrics: ModelMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._tokens = 0
        self._last_time: float | None = None
        self._reason: str | None = None
        self._has_output = False

    def record(self, output: RequestOutput) -> None:
        """Records an output: a delta, or the whole output once."""
        self._has_output = True
        now = time.monotonic()
        new = sum(len(completion.token_ids) for completion in output.outputs)
        if self._last_time is not None and new:
            each = (now - self._last_time) / new
            for _ in range(new):
                self._metrics.observe("inter_token_latency_seconds", each)
        self._last_time = now
        self._tokens += new
        for completion in output.outputs:
            self._reason = completion.finish_reason or self._reason
        if output.finished:
            self._record_finished(output)

    def close(self) -> None:
        """Counts the request as finished, or as aborted if it has no finish reason."""
        if self._has_output:
            self._metrics.count_finished(self._reason or "abort")

    def _record_finished(self, output: RequestOutput) -> None:
        metrics, params, times = self._metrics, self._params, output.metrics
        metrics.count_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
        metrics.observe("request_prompt_tokens", len(output.prompt_token_ids))
        metrics.observe("request_generation_tokens", self._tokens)
        metrics.observe("request_params_n", params.n)
        if params.max_tokens is not None:
            metrics.observe("request_params_max_tokens", params.max_tokens)
        scheduled, first, end = times.scheduled_time, times.first_token_time, times.finished_time
        if scheduled is None or first is None or end is None:
            return
        metrics.observe("time_to_first_token_seconds", first - times.arrival_time)
        metrics.observe("e2e_request_latency_seconds", end - times.arrival_time)
        metrics.observe("request_queue_time_seconds", scheduled - times.arrival_time)
        metrics.observe("request_prefill_time_seconds", first - scheduled)
        metrics.observe("request_decode_time_seconds", end - first)
        metrics.observe("request_inference_time_seconds", end - scheduled)
        tokens_after_first = self._tokens / params.n - 1
        if tokens_after_first > 0:
            metrics.observe("request_time_per_output_token_seconds", (end - first) / tokens_after_first)


def record_pooled(metrics: ModelMetrics, outputs: Sequence[PoolingRequestOutput[Any]], inputs: int) -> None:
    """Records the outputs of a request that pools; inputs without an output were aborted."""
    for output in outputs:
        times = output.metrics
        assert times.scheduled_time is not None and times.finished_time is not None
        metrics.observe("request_prompt_tokens", len(output.prompt_token_ids))
        metrics.observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        metrics.observe("request_queue_time_seconds", times.scheduled_time - times.arrival_time)
        metrics.observe("request_inference_time_seconds", times.finished_time - times.scheduled_time)
        metrics.count_finished("stop")
    for _ in range(inputs - len(outputs)):
        metrics.count_finished("abort")


class AudioMetrics:
    """Collects the metrics of one request with audio, from its arrival on.

    Args:
        metrics: metrics of the model.
    """

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._begin: float | None = None

    def begin(self) -> None:
        """Notes that computing begins."""
        self._begin = time.monotonic()

    def finish(self, seconds: float) -> None:
        """Records a request that has ended with a result for so many seconds of audio."""
        assert self._begin is not None
        end = time.monotonic()
        self._metrics.observe("request_queue_time_seconds", self._begin - self._arrival)
        self._metrics.observe("request_inference_time_seconds", end - self._begin)
        self._metrics.observe("e2e_request_latency_seconds", end - self._arrival)
        self._metrics.count_audio(seconds, end - self._begin)
        self._metrics.count_finished("stop")

    def abort(self) -> None:
        """Records a request that was stopped before its end."""
        self._metrics.count_finished("abort")


class _EngineCollector(Collector):
    """Statistics that the engines count themselves, read on each scrape."""

    def __init__(self, engines: Mapping[str, AllStats]) -> None:
        self._engines = engines

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        engines = self._labeled()
        gauges = {labels: stats.gauges() for labels, stats in engines.items()}
        totals = {labels: stats.totals for labels, stats in engines.items()}
        yield from _families(GaugeMetricFamily, "vllm", GAUGES, gauges)
        yield from _families(CounterMetricFamily, "vllm", COUNTERS, totals)
        experts = {labels: stats.experts() for labels, stats in engines.items() if stats.experts is not None}
        disk = {labels: stats.disk() for labels, stats in engines.items() if stats.disk is not None}
        if experts:  # are on disk
            yield from _families(CounterMetricFamily, "armllm", EXPERT_COUNTERS, experts)
            yield from _families(GaugeMetricFamily, "armllm", EXPERT_GAUGES, experts)
        if disk:  # holds a prefix cache
            yield from _families(CounterMetricFamily, "armllm", DISK_COUNTERS, disk)
            yield from _families(GaugeMetricFamily, "armllm", DISK_GAUGES, disk)

    def _labeled(self) -> dict[tuple[str, str], EngineStats]:
        """Returns the statistics of all engines by their labels."""
        return {
            (name, str(number)): stats
            for name, all_stats in self._engines.items()
            for number, stats in enumerate(all_stats())
        }


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    prefix: str,
    rows: Iterable[tuple[Any, ...]],
    counts: Mapping[tuple[str, str], Any],
) -> Iterator[Metric]:
    """Yields a metric a row: its name and text, the field of what each engine counts, and the unit of it."""
    for name, text, field, *unit in rows:
        metric = family(f"{prefix}:{name}", text, labels=_ENGINE_LABELS)
        for labels, counted in counts.items():
            metric.add_metric(labels, math.prod(unit) * getattr(counted, field))
        yield metric
