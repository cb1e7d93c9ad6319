"""Numbers for Prometheus; names are vLLM's where they mean the same, so that its boards work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.stats import EngineStats

_LABEL = "model_name"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_COUNTS = tuple(size * 10**power for power in range(5) for size in (1, 2, 5))
_ANSWERS = (1, 2, 5, 10, 20)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _FIRST),
    "inter_token_latency_seconds": ("Between two outputs of a stream, for each token.", _BETWEEN),
    "request_time_per_output_token_seconds": ("Mean of a request's tokens behind the first.", _BETWEEN),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _WHOLE),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", _WHOLE),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", _WHOLE),
    "request_decode_time_seconds": ("From a request's first token to its end.", _WHOLE),
    "request_inference_time_seconds": ("From a request's first step to its end.", _WHOLE),
    "request_prompt_tokens": ("Tokens of prompts.", _COUNTS),
    "request_generation_tokens": ("Tokens of answers.", _COUNTS),
    "request_params_n": ("Answers that requests ask for.", _ANSWERS),
    "request_params_max_tokens": ("Most tokens that requests ask for.", _COUNTS),
}

_GAUGES = (
    ("num_requests_running", "Answers that take part in steps.", "running"),
    ("num_requests_waiting", "Answers that wait for their turn.", "waiting"),
    ("kv_cache_usage_perc", "Part of the KV cache's blocks in use, 0 to 1.", "kv_usage"),
)
_COUNTERS = (
    ("prompt_tokens", "Tokens of prompts that were computed.", "prompt_tokens"),
    ("generation_tokens", "Tokens that were drawn.", "generation_tokens"),
    ("num_preemptions", "Answers that lost their blocks to others.", "preemptions"),
    ("spec_decode_num_draft_tokens", "Tokens that were guessed.", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Guessed tokens that were right.", "accepted_tokens"),
)


class Metrics:
    """Numbers of a server; each is labeled by the model that it belongs to."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engines: dict[str, EngineStats] = {}
        self.reasons: defaultdict[str, set[str]] = defaultdict(set)
        self.registry.register(_EngineCollector(self.engines))
        self.ends = Counter(
            "vllm:request_success",
            "Requests that ended, by what ended them.",
            [_LABEL, "finished_reason"],
            registry=self.registry,
        )
        self.prefix = {
            what: Counter(f"vllm:prefix_cache_{what}", text, [_LABEL], registry=self.registry)
            for what, text in (
                ("queries", "Tokens of prompts that the prefix cache was asked for."),
                ("hits", "Tokens of prompts that the prefix cache held."),
            )
        }
        self.histograms = {
            short: Histogram(f"vllm:{short}", text, [_LABEL], registry=self.registry, buckets=limits)
            for short, (text, limits) in _HISTOGRAMS.items()
        }

    def of(self, name: str, stats: EngineStats) -> ModelMetrics:
        """Numbers of a model; those of another with its name go on.

        Args:
            name: of the model.
            stats: of its engine.
        """
        self.engines[name] = stats
        return ModelMetrics(self, name, stats)

    def page(self) -> bytes:
        """All numbers, in Prometheus' text format."""
        return bytes(generate_latest(self.registry))


class ModelMetrics:
    """Numbers of a model that is served; see `Metrics.of`."""

    def __init__(self, metrics: Metrics, name: str, stats: EngineStats) -> None:
        self._metrics = metrics
        self._name = name
        self._stats = stats
        self._prefix = {what: counter.labels(name) for what, counter in metrics.prefix.items()}
        self._histograms = {short: found.labels(name) for short, found in metrics.histograms.items()}

    def observe(self, name: str, value: float) -> None:
        """Enters a value into a histogram."""
        self._histograms[name].observe(value)

    def count_end(self, reason: str) -> None:
        """Counts a request that ended."""
        self._metrics.reasons[self._name].add(reason)
        self._metrics.ends.labels(self._name, reason).inc()

    def count_prompt(self, tokens: int, cached: int) -> None:
        """Counts what the prefix cache did for a prompt."""
        self._prefix["queries"].inc(tokens)
        self._prefix["hits"].inc(cached)

    def close(self) -> None:
        """Takes the model's numbers away, unless another one has its name by now."""
        metrics = self._metrics
        if metrics.engines.get(self._name) is not self._stats:
            return
        del metrics.engines[self._name]
        for metric in (*metrics.prefix.values(), *metrics.histograms.values()):
            metric.remove(self._name)
        for reason in metrics.reasons.pop(self._name, ()):
            metrics.ends.remove(self._name, reason)


class Watch:
    """What becomes of one request; `close` it when nobody waits for it any more.

    Args:
        metrics: where it is told.
        params: of the request.
    """

    def __init__(self, metrics: ModelMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._tokens = 0
        self._last: float | None = None
        self._reason: str | None = None
        self._arrived = False

    def see(self, output: RequestOutput) -> None:
        """Takes note of an output, which holds what is new or, once, everything."""
        self._arrived = True
        now = time.monotonic()
        new = sum(len(answer.token_ids) for answer in output.outputs)
        if self._last is not None and new:
            each = (now - self._last) / new
            for _ in range(new):
                self._metrics.observe("inter_token_latency_seconds", each)
        self._last = now
        self._tokens += new
        for answer in output.outputs:
            self._reason = answer.finish_reason or self._reason
        if output.finished:
            self._tell(output)

    def close(self) -> None:
        """Counts the request, as given up where it has not finished."""
        if self._arrived:
            self._metrics.count_end(self._reason or "abort")

    def _tell(self, output: RequestOutput) -> None:
        metrics, params, times = self._metrics, self._params, output.metrics
        metrics.count_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
        metrics.observe("request_prompt_tokens", len(output.prompt_token_ids))
        metrics.observe("request_generation_tokens", self._tokens)
        metrics.observe("request_params_n", params.n)
        if params.max_tokens is not None:
            metrics.observe("request_params_max_tokens", params.max_tokens)
        begun, first, end = times.scheduled_time, times.first_token_time, times.finished_time
        if begun is None or first is None or end is None:
            return
        metrics.observe("time_to_first_token_seconds", first - times.arrival_time)
        metrics.observe("e2e_request_latency_seconds", end - times.arrival_time)
        metrics.observe("request_queue_time_seconds", begun - times.arrival_time)
        metrics.observe("request_prefill_time_seconds", first - begun)
        metrics.observe("request_decode_time_seconds", end - first)
        metrics.observe("request_inference_time_seconds", end - begun)
        each = self._tokens / params.n - 1
        if each > 0:
            metrics.observe("request_time_per_output_token_seconds", (end - first) / each)


class _EngineCollector(Collector):
    """What engines count themselves, read when somebody asks."""

    def __init__(self, engines: Mapping[str, EngineStats]) -> None:
        self._engines = engines

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        gauges = {name: stats.gauges() for name, stats in self._engines.items()}
        for short, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{short}", text, labels=[_LABEL])
            for name, found in gauges.items():
                gauge.add_metric([name], getattr(found, field))
            yield gauge
        for short, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"vllm:{short}", text, labels=[_LABEL])
            for name, stats in self._engines.items():
                counter.add_metric([name], getattr(stats.totals, field))
            yield counter
