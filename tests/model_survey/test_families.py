"""Every causal language model of transformers, tiny and random, before and after `patch`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers

import torch_armllm
from tests.support.parity import CAPTURED, check_quantized, check_unquantized, steps
from torch_armllm.hf.releases import NEWEST_TESTED
from torch_armllm.model_survey.stacks import stack_families
from torch_armllm.model_survey.table import describe, survey
from torch_armllm.model_survey.tiny_models import families, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEST = ["plan", "graph", "modules", "-"]


def rows_of(section: str) -> dict[str, str]:
    return {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}


CAUSAL, BOTH, ENCODERS = PAGE.read_text().split("\n## ")
ROWS = rows_of(CAUSAL)
STACKS = rows_of(BOTH) | rows_of(ENCODERS)

NOT_RUN = {
    "blt": "transformers' own forward of it looks for num_hidden_layers, which its configuration lacks",
    "xlstm": "transformers' own forward of it takes whole chunks of tokens only",
}
"""Families whose quantized model is not run, and why."""
NOT_IN_BFLOAT16 = {"inkling2_text": "its own forward multiplies float32 by the router's weight"}
"""Families whose own forward fails in bfloat16, and where."""


def by_ops(among: Iterable[str], rows: dict[str, str] = ROWS) -> list[str]:
    """Returns a family for each set of ops and each reason for modules, and two of other casts."""
    found: dict[tuple[str, ...], str] = {}
    for family in among:
        runs, _, reason, ops = rows[family].split("|")[2:6]
        found.setdefault((runs, *(sorted(re.findall(r"`(\w+)`", ops)) or [reason])), family)
    return sorted({*found.values(), *{"gemma3_text", "gpt_oss"}.intersection(among)})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Takes families that stand for the others; all of them would take half an hour."""
    thorough = metafunc.config.getoption("thorough")
    if "bfloat16_family" in metafunc.fixturenames:
        among = by_ops(family for family in CAPTURED if family not in NOT_IN_BFLOAT16)
        metafunc.parametrize("bfloat16_family", among if thorough else among[::3])
    for fixture, among, rows in (
        ("captured_family", CAPTURED, ROWS),
        ("causal_family", families(), ROWS),
        ("stack_family", list(stack_families()), STACKS),
    ):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, among if thorough else by_ops(among, rows))


def skip_what_cannot_run(family: str) -> None:
    if "| - |" in ROWS[family]:
        pytest.skip("the page says why it has no tiny model")
    if family in NOT_RUN:
        pytest.skip(NOT_RUN[family])


def runs_on_page(family: str, rows: dict[str, str] = ROWS) -> str:
    return rows[family].split("|")[2].strip()


def test_page_lists_every_family() -> None:
    if (installed := transformers.__version__) != (tested := NEWEST_TESTED["transformers"]):
        pytest.skip(f"the page is of transformers {tested}, this is {installed}")
    assert list(ROWS) == families(), "run make models"
    assert list(STACKS) == list(stack_families()), "run make models"


def test_readme_says_of_the_most_used_families_what_the_page_says() -> None:
    text = (PAGE.parents[1] / "README.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `(\w+)` \|[^|]*\| (\w+) \|$", text, flags=re.M)
    assert len(rows) == 20
    assert rows == [(family, runs_on_page(family)) for family, _ in rows]


def test_unquantized_steps_equal_the_models(captured_family: str) -> None:
    check_unquantized(captured_family)


def test_bfloat16_steps_run_as_graphs(bfloat16_family: str) -> None:
    model = tiny_model(bfloat16_family, torch.bfloat16)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    assert not [note for note in report.notes if "report this as a bug" in note], report.notes
    assert all(bool(logits.isfinite().all()) for logits in steps(model).values())


def test_quantized_steps_match_the_emulation(causal_family: str) -> None:
    skip_what_cannot_run(causal_family)
    now = describe(causal_family, check_quantized(causal_family))
    assert BEST.index(now.runs) <= BEST.index(runs_on_page(causal_family)), f"{now}; run make models"


def test_encoders_and_decoders_run_as_the_page_says(stack_family: str) -> None:
    now = survey(stack_family, stack_families()[stack_family])
    assert BEST.index(now.runs) <= BEST.index(runs_on_page(stack_family, STACKS)), f"{now}; run make models"
