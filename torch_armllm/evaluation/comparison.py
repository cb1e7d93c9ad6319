"""Comparison of variants with the baseline, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch_armllm.evaluation.paired_tests import Estimate, difference, mcnemar, mean, weighted
from torch_armllm.evaluation.task_results import TaskResult


@dataclass(frozen=True)
class Line:
    """A metric of a task in a variant.

    Attributes:
        score, stderr: the score of the variant, and its standard error.
        change: difference from the baseline, or ratio for perplexities; None for the baseline itself.
        change_stderr: standard error of the change, paired by row.
        p: p-value of McNemar's exact test, for right and wrong answers.
        changed: share of rows with another answer.
        moved: mean absolute difference of log-likelihoods, in nats.
        kl, kl_stderr, agreement: for texts, see `LogitComparison`.
    """

    task: str
    rows: int
    metric: str
    kind: str
    scheme: str
    score: float
    stderr: float | None = None
    change: float | None = None
    change_stderr: float | None = None
    p: float | None = None
    changed: float | None = None
    moved: float | None = None
    kl: float | None = None
    kl_stderr: float | None = None
    agreement: float | None = None

    @property
    def is_ratio(self) -> bool:
        """True if `change` is a ratio."""
        return self.kind in ("perplexity", "weighted")

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types."""
        return asdict(self)


def compare(results: Mapping[str, Mapping[str, TaskResult]], baseline: str) -> list[Line]:
    """Returns all lines: tasks in the order of the first variant that has them, variants in their order.

    Args:
        results: the results of each variant by task.
        baseline: the variant that others are compared with; a task that it lacks is not compared.
    """
    names = list(dict.fromkeys(task for tasks in results.values() for task in tasks))
    return [
        line
        for task in names
        for metric in next(tasks[task] for tasks in results.values() if task in tasks).scores
        for scheme, tasks in results.items()
        if task in tasks
        for line in _line(
            task,
            metric,
            scheme,
            tasks[task],
            None if scheme == baseline else results.get(baseline, {}).get(task),
        )
    ]


def shown(lines: Iterable[Line]) -> Iterator[Line]:
    """Yields the lines that tables and plots show: of a text's metrics, which say the same, the first."""
    texts: dict[str, str] = {}
    for line in lines:
        if line.kind not in ("weighted", "bits") or texts.setdefault(line.task, line.metric) == line.metric:
            yield line


def _line(task: str, metric: str, scheme: str, result: TaskResult, base: TaskResult | None) -> Iterator[Line]:
    if metric not in result.scores:
        return
    kind = result.kinds[metric]
    values = result.values(metric)
    figures: dict[str, Any] = {"stderr": _stderr(kind, list(values.values()))}
    if base is not None and metric in base.scores:
        shared = [key for key in values if key in base.values(metric)]
        figures.update(
            _change(kind, [base.values(metric)[key] for key in shared], [values[key] for key in shared])
        )
        figures.update(_answer_changes(base, result))
        figures.update({key: result.distributions.get(key) for key in ("kl", "kl_stderr", "agreement")})
    yield Line(task, len(values), metric, kind, scheme, result.scores[metric], **figures)


def _stderr(kind: str, values: list[Any]) -> float | None:
    if kind == "mean":
        return mean(values).stderr
    if kind == "perplexity":
        return _perplexity_stderr(mean(values))
    if kind in ("weighted", "bits"):
        estimate = weighted([(value, weight) for value, weight in values])
        return _perplexity_stderr(estimate) if kind == "weighted" else estimate.stderr / math.log(2)
    return None


def _perplexity_stderr(likelihood: Estimate) -> float:
    return math.exp(-likelihood.value) * likelihood.stderr


def _change(kind: str, a: list[Any], b: list[Any]) -> dict[str, float]:
    if not a or kind == "other":
        return {}
    if kind == "mean":
        change = difference(a, b)
        right = all(value in (0, 1) for value in (*a, *b))
        return {
            "change": change.value,
            "change_stderr": change.stderr,
            **({"p": mcnemar(a, b)} if right else {}),
        }
    if kind == "perplexity":
        lost = difference(b, a)
    else:  # both have the same weights
        lost = weighted([(x[0] - y[0], x[1]) for x, y in zip(a, b, strict=True)])
    if kind == "bits":
        return {"change": lost.value / math.log(2), "change_stderr": lost.stderr / math.log(2)}
    return {"change": math.exp(lost.value), "change_stderr": math.exp(lost.value) * lost.stderr}


def _answer_changes(base: TaskResult, result: TaskResult) -> dict[str, float]:
    """Returns the share of changed answers and the change of log-likelihoods; nothing for texts."""
    if any(kind in ("weighted", "bits") for kind in result.kinds.values()):
        return {}
    before = {row.id: row for row in base.rows}
    pairs = [(before[row.id], row) for row in result.rows if row.id in before]
    if not pairs:
        return {}
    moved = [abs(x - y) for a, b in pairs for x, y in zip(a.loglikelihoods, b.loglikelihoods, strict=True)]
    return {
        "changed": sum(a.answer != b.answer for a, b in pairs) / len(pairs),
        **({"moved": sum(moved) / len(moved)} if moved else {}),
    }
