"""Metrics of an engine, under vLLM's names where they mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_armllm.engine.reports.stats import EngineStats

GAUGES = (
    ("num_requests_running", "Sequences that take part in steps.", "running"),
    ("num_requests_waiting", "Sequences that wait to be scheduled.", "waiting"),
    ("kv_cache_usage_perc", "Fraction of the KV cache's blocks in use, 0 to 1.", "kv_usage"),
)
COUNTERS = (
    ("prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("num_preemptions", "Preempted sequences.", "preemptions"),
    ("spec_decode_num_draft_tokens", "Draft tokens proposed.", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted_tokens"),
)
EXPERT_COUNTERS = (
    ("expert_cache_hits", "Experts that a layer needed and that were in memory.", "hits", 1),
    ("expert_cache_misses", "Experts that a layer needed and that were on disk.", "misses", 1),
    ("expert_cache_read_bytes", "Bytes of experts read from the disk.", "bytes_read", 1),
    ("expert_cache_wait_seconds", "Time that steps waited for experts.", "waited", 1e-9),
)
EXPERT_GAUGES = (
    ("expert_cache_bytes", "Bytes of the experts in memory.", "resident"),
    ("expert_cache_max_bytes", "Bytes that experts in memory may take.", "budget"),
)
DISK_COUNTERS = (
    ("prefix_cache_disk_hits", "Prompt tokens that the prefix cache read from the disk.", "hits"),
    ("prefix_cache_disk_misses", "Prompt tokens that were neither in memory nor on the disk.", "misses"),
    ("prefix_cache_disk_read_bytes", "Bytes that the prefix cache read from the disk.", "bytes_read"),
    ("prefix_cache_disk_written_bytes", "Bytes that the prefix cache wrote to the disk.", "bytes_written"),
    ("prefix_cache_disk_dropped", "Blocks whose memory was needed before they were written.", "dropped"),
)
DISK_GAUGES = (
    ("prefix_cache_disk_bytes", "Bytes of the prefix cache on the disk.", "nbytes"),
    ("prefix_cache_disk_max_bytes", "Bytes that the prefix cache may take on the disk.", "limit"),
)


@dataclass(frozen=True)
class Metric:
    """A metric at one moment.

    Attributes:
        name: as Prometheus has it, such as ``vllm:num_requests_running``.
        value: of the metric.
        labels: ``model_name``, and ``engine``, a number.
    """

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class Counter(Metric):
    """A metric that only grows."""


class Gauge(Metric):
    """A metric that goes up and down."""


def read_metrics(stats: EngineStats, model_name: str, engine: int = 0) -> Iterator[Metric]:
    """Yields the metrics of an engine.

    Args:
        stats: of the engine.
        model_name: label of each metric.
        engine: number of the engine, another label.
    """
    labels = {"model_name": model_name, "engine": str(engine)}
    gauges = stats.gauges()
    for name, _, attribute in GAUGES:
        yield Gauge(f"vllm:{name}", getattr(gauges, attribute), labels)
    for name, _, attribute in COUNTERS:
        yield Counter(f"vllm:{name}", getattr(stats.totals, attribute), labels)
    if stats.experts is not None:
        experts = stats.experts()
        for name, _, attribute, unit in EXPERT_COUNTERS:
            yield Counter(f"armllm:{name}", unit * getattr(experts, attribute), labels)
        for name, _, attribute in EXPERT_GAUGES:
            yield Gauge(f"armllm:{name}", getattr(experts, attribute), labels)
    if stats.disk is not None:
        disk = stats.disk()
        for name, _, attribute in DISK_COUNTERS:
            yield Counter(f"armllm:{name}", getattr(disk, attribute), labels)
        for name, _, attribute in DISK_GAUGES:
            yield Gauge(f"armllm:{name}", getattr(disk, attribute), labels)
