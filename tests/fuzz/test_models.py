"""A few random models of the fuzzer; ``make fuzz-models`` runs thousands."""

from __future__ import annotations

import pytest

from tests.fuzz.models import Unfit, captured_families, draw, main, run
from tests.support.parity import steps

CASES = [("afmoe", 0), ("llama", 2), ("gemma3_text", 3), ("deepseek_v3", 1), ("gpt_oss", 2), ("glm4_moe", 5)]


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_random_configuration(family: str, seed: int) -> None:
    case = draw(seed, family)
    try:
        assert run(case) in ("plan", "graph"), case
    except Unfit as reason:
        pytest.skip(f"{case}: {reason}"[:200])


def test_cases_repeat_and_vary() -> None:
    assert draw(3) == draw(3)
    drawn = [draw(seed, "llama") for seed in range(20)]
    assert len({str(case.overrides) for case in drawn}) > 10
    assert {family for family, _ in CASES} <= set(captured_families())


def test_difference_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = lambda model: {name: logits + 0.1 * logits.abs().max() for name, logits in steps(model).items()}  # noqa: E731
    monkeypatch.setattr("tests.fuzz.models.steps", wrong)
    assert main(["--family", "llama", "--seeds", "1", "--first", "3"]) == 1
    assert "FINDING seed 3: llama(" in capsys.readouterr().out
