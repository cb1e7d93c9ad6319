"""The comparison table against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torch_armllm.evaluation.comparison import Line, compare
from torch_armllm.evaluation.results_file import VariantResult
from torch_armllm.evaluation.table import as_markdown, as_text
from torch_armllm.evaluation.task_results import Row, TaskResult


def _choices(answers: list[tuple[float, list[float]]]) -> TaskResult:
    rows = [
        Row(str(n), {"acc": right}, likely, likely.index(max(likely)))
        for n, (right, likely) in enumerate(answers)
    ]
    return TaskResult({"acc": "mean"}, {"acc": sum(r for r, _ in answers) / len(answers)}, rows)


def _text(values: list[tuple[float, int]], distributions: dict[str, Any]) -> TaskResult:
    rows = [
        Row(str(n), {"word_perplexity": list(value)}, [value[0]], False) for n, value in enumerate(values)
    ]
    score = math.exp(-sum(v for v, _ in values) / sum(w for _, w in values))
    return TaskResult({"word_perplexity": "weighted"}, {"word_perplexity": score}, rows, distributions)


def _lines(base: TaskResult, other: TaskResult) -> tuple[Line, Line]:
    first, second = compare({"bf16": {"t": base}, "int4": {"t": other}}, "bf16")
    return first, second


def test_right_and_wrong_answers() -> None:
    base = _choices([(1, [-1, -2]), (1, [-3, -1]), (0, [-1, -4]), (1, [-1, -9])])
    other = _choices([(0, [-2, -1.5]), (1, [-3, -2]), (0, [-1, -4]), (0, [-5, -4])])
    first, second = _lines(base, other)
    assert (first.score, first.change, first.p) == (0.75, None, None)
    assert first.stderr == pytest.approx(math.sqrt((3 * 0.0625 + 0.5625) / 3 / 4))
    assert second.score == 0.25
    assert (second.change, second.change_stderr) == pytest.approx((-0.5, math.sqrt(1.0 / 3 / 4)))
    assert second.p == 0.5  # two changed, both for the worse: 2 · 1 / 4
    assert second.changed == 0.5
    assert second.moved == pytest.approx((1 + 0.5 + 0 + 1 + 0 + 0 + 4 + 5) / 8)


def test_rows_missing_in_one_run_do_not_count() -> None:
    base = _choices([(1, [-1, -2]), (1, [-1, -2]), (0, [-1, -2])])
    _, second = _lines(base, _choices([(0, [-2, -1]), (1, [-1, -2])]))
    assert second.change == -0.5


def test_perplexity_of_texts_is_a_ratio() -> None:
    found = {"tokens": 10, "kl": 0.25, "kl_stderr": 0.01, "agreement": 0.9}
    first, second = _lines(_text([(-20.0, 10), (-30.0, 10)], {}), _text([(-22.0, 10), (-34.0, 10)], found))
    assert first.score == pytest.approx(math.exp(2.5))
    # losses of 2 and 4 over 20 words: e^0.3; residuals −1 and 1: √(2 · 2 / 1) / 20
    assert second.change == pytest.approx(math.exp(0.3))
    assert second.change_stderr == pytest.approx(math.exp(0.3) * 0.1)
    assert (second.kl, second.agreement, second.changed) == (0.25, 0.9, None)


def test_perplexity_by_row() -> None:
    def result(values: list[float]) -> TaskResult:
        rows = [Row(str(n), {"perplexity": v}, [v], v > -1) for n, v in enumerate(values)]
        return TaskResult(
            {"perplexity": "perplexity"}, {"perplexity": math.exp(-sum(values) / len(values))}, rows
        )

    first, second = _lines(result([-0.5, -2.0]), result([-1.5, -2.5]))
    assert first.stderr == pytest.approx(math.exp(1.25) * 0.75)
    assert second.change == pytest.approx(math.exp(0.75))
    assert second.change_stderr == pytest.approx(math.exp(0.75) * 0.25)
    assert second.changed == 0.5


def test_metrics_of_other_kinds_are_shown_without_a_change() -> None:
    rows = [Row("0", {"f1": [0, 1]}, [], "yes")]
    first, second = _lines(*(TaskResult({"f1": "other"}, {"f1": 0.5}, rows) for _ in range(2)))
    assert (second.score, second.stderr, second.change) == (0.5, None, None)
    assert second.changed == 0.0


def test_scores_are_shown_without_a_baseline() -> None:
    (line,) = compare({"bf16": {}, "int4": {"t": _choices([(1, [-1, -2]), (0, [-1, -2])])}}, "bf16")
    assert (line.scheme, line.score, line.change) == ("int4", 0.5, None)


def test_table_shows_failures_and_changes() -> None:
    base, other = _choices([(1, [-1, -2]), (0, [-1, -2])]), _choices([(0, [-2, -1]), (0, [-1, -2])])
    schemes = {
        "bf16": VariantResult(16.0, 2_000_000, {"t": base}),
        "int4": VariantResult(4.14, 500_000, {"t": other}, "ValueError: no room"),
    }
    lines = _lines(base, other)
    text, page = as_text(lines, schemes), as_markdown(lines, schemes, "A model")
    for wanted in ("4.14 bits a weight", "no room", "-0.5000 ± 0.5000", "50.0 %", "1.000"):
        assert wanted in text and wanted in page
    assert len({row.count("|") for row in page.splitlines() if row.startswith("|")}) == 1
