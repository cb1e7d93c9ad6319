"""A few random models of the fuzzer; ``make fuzz-models`` runs thousands."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.fuzz.configurations import captured_families, draw
from tests.fuzz.models import main, run
from tests.support.parity import Texts, steps

CASES = [
    ("llama", 2, "float", "plan"),
    ("gemma3_text", 3, "float", "plan"),
    ("falcon_h1", 0, "float", "plan"),
    ("gpt_oss", 2, "float", "graph"),
    ("afmoe", 0, "quantized", "plan"),
    ("deepseek_v3", 1, "quantized", "plan"),
    ("granitemoehybrid", 3, "quantized", "plan"),
]


@pytest.mark.parametrize(("family", "seed", "mode", "runs"), CASES)
def test_random_configuration(family: str, seed: int, mode: str, runs: str) -> None:
    case = draw(seed, family)
    assert run(case, mode) == runs, case


def test_cases_repeat_and_vary() -> None:
    assert draw(3, "bamba") == draw(3, "bamba")
    drawn = [draw(seed, "llama") for seed in range(12)]
    assert len({str(case.overrides) for case in drawn}) > 9
    assert {family for family, *_ in CASES} <= set(captured_families())


@pytest.mark.parametrize("mode", ["float", "quantized"])
def test_difference_is_a_finding(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(model: Any, texts: Texts) -> dict[str, Tensor]:
        found = steps(model, texts)
        found["mixed"][0, 20] += 1e-2 * found["mixed"].abs().max()  # one token of one kind of step
        return found

    monkeypatch.setattr("tests.support.parity.steps", wrong)
    assert main(["--family", "llama", "--seeds", "1", "--first", "3", "--mode", mode]) == 1
    printed = capsys.readouterr().out
    assert "FINDING seed 3: llama(" in printed and "mixed by 0.01" in printed
