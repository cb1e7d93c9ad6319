"""The results of a task: values, log-likelihoods and answers by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = {
    "mean": "mean",
    "nanmean": "mean",
    "perplexity": "perplexity",
    "weighted_perplexity": "weighted",
    "bits_per_byte": "bits",
}
"""The kind of each of lm-eval's aggregations; metrics of other kinds are reported without a comparison."""


@dataclass
class Row:
    """The outcome of a question.

    Attributes:
        id: identity of the question and its filter, the same in every run.
        values: the value of each metric.
        loglikelihoods: of each option, or of the only continuation; empty for generation tasks.
        answer: the likeliest option, whether the only continuation is greedy, or the generated output.
    """

    id: str
    values: dict[str, Any]
    loglikelihoods: list[float]
    answer: int | bool | str


@dataclass
class TaskResult:
    """The results of a task in a variant.

    Attributes:
        kinds: the kind of each metric: a value of `KINDS` or ``other``.
        scores: lm-eval's score of each metric.
        rows: the outcomes of all questions.
        distributions: for texts, the result of `BaselineLogits` or `LogitComparison`.
        seconds: elapsed time.
        cpu_seconds: CPU time of all cores.
    """

    kinds: dict[str, str]
    scores: dict[str, float]
    rows: list[Row]
    distributions: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @classmethod
    def of(cls, name: str, task: Any, results: dict[str, Any]) -> TaskResult:
        """Converts lm-eval's results of a task."""
        samples = results["samples"][name]
        aggregations = task.aggregation()
        kinds: dict[str, str] = {}
        for sample in samples:
            for metric in sample["metrics"]:
                how = getattr(aggregations.get(metric), "__name__", "")
                kinds[_key(metric, sample["filter"])] = KINDS.get(how, "other")
        task_results = results["results"][name]
        keys = {key: key if "," in key else f"{key},none" for key in kinds}
        scores = {
            key: float(task_results[full]) for key, full in keys.items() if _is_number(task_results.get(full))
        }
        return cls(kinds, scores, [_row(sample) for sample in samples])

    def values(self, metric: str) -> dict[str, Any]:
        """Returns a metric's value by row."""
        return {row.id: row.values[metric] for row in self.rows if metric in row.values}

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TaskResult:
        """Restores a result of `to_dict`."""
        return cls(**{**saved, "rows": [Row(**row) for row in saved["rows"]]})


def _key(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric},{filtered}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _row(sample: dict[str, Any]) -> Row:
    identity = f"{sample['doc_id']}:{sample['doc_hash'][:16]}:{sample['filter']}"
    values = {_key(metric, sample["filter"]): _plain(sample[metric]) for metric in sample["metrics"]}
    replies = [reply[0] for reply in sample["resps"]]
    if isinstance(replies[0], str):
        return Row(identity, values, [], str(replies[0]))
    likely = [float(reply[0] if isinstance(reply, Sequence) else reply) for reply in replies]
    if len(likely) > 1:
        return Row(identity, values, likely, max(range(len(likely)), key=likely.__getitem__))
    greedy = isinstance(replies[0], Sequence) and bool(replies[0][1])
    return Row(identity, values, likely, greedy)


def _plain(value: Any) -> Any:
    """Converts a metric's value to JSON types."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float)) or value is None else float(value)
