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
BEST = ["plan", "graph", "modules", "refused", "-"]


def rows_of(section: str) -> dict[str, str]:
    return {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}


CAUSAL, BOTH, ENCODERS, *_ = PAGE.read_text().split("\n## ")
ROWS = rows_of(CAUSAL)
STACKS = rows_of(BOTH) | rows_of(ENCODERS)

OF_TIMM = ("gemma3n",)
"""Families whose vision towers are timm's."""
NOT_RUN = {
    "blt": "transformers' own forward of it looks for num_hidden_layers, which its configuration lacks",
    "musicgen": "its prompts have a row for each codebook",
    "musicgen_melody": "its prompts have a row for each codebook",
    "xlstm": "transformers' own forward of it takes whole chunks of tokens only",
}
"""Families whose quantized model is not run, and why."""
NOT_IN_BFLOAT16 = {"inkling2_text": "its own forward multiplies float32 by the router's weight"}
"""Families whose own forward fails in bfloat16, and where."""


ARGUMENTS = {"bloom", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "doge", "gemma4_text"}
"""Slopes, capped scores, windows, learned positions, sinks, biases of keys, and keys of other layers: what
attention is given is not seen in the names of ops."""


def result_of(row: str) -> tuple[str, frozenset[str]]:
    """Returns what runs a family, and its ops; without ops, the first words of its reason except names."""
    runs, _, reason, ops = (each.strip() for each in row.split("|")[2:6])
    words = re.findall(r"(?<!\S)[a-z]+(?=[\s:]|$)", reason)
    return runs, frozenset(re.findall(r"`(\w+)`", ops) or [" ".join(words[:3])])


def standing_for_all(among: Iterable[str], rows: dict[str, str] = ROWS) -> list[str]:
    """Returns a family for each set of ops that no other family's contains, each kind of reason for modules,
    and each of `ARGUMENTS`.

    Families that no plan or module runs are left out.
    """
    first = {result_of(rows[family]): family for family in reversed(list(among))}
    results = [result for result in first if result[0] not in ("refused", "-")]
    largest = [r for r in results if not any(r[0] == other[0] and r[1] < other[1] for other in results)]
    return sorted({*(first[result] for result in largest), *ARGUMENTS.intersection(among)})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Takes families that stand for the others; all of them would take half an hour."""
    thorough = metafunc.config.getoption("thorough")
    for fixture, among, rows in (
        ("captured_family", CAPTURED, ROWS),
        ("bfloat16_family", [family for family in CAPTURED if family not in NOT_IN_BFLOAT16], ROWS),
        ("causal_family", families(), ROWS),
        ("stack_family", list(stack_families()), STACKS),
    ):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, among if thorough else standing_for_all(among, rows))


def skip_what_cannot_run(family: str) -> None:
    if runs_on_page(family) in ("refused", "-"):
        pytest.skip("the page says why it is not run")
    if family in NOT_RUN:
        pytest.skip(NOT_RUN[family])
    if family in OF_TIMM:
        pytest.importorskip("timm", reason="its vision tower needs the extra timm")


def runs_on_page(family: str, rows: dict[str, str] = ROWS) -> str:
    return rows[family].split("|")[2].strip()


def test_page_lists_every_family() -> None:
    if (installed := transformers.__version__) != (tested := NEWEST_TESTED["transformers"]):
        pytest.skip(f"the page is of transformers {tested}, this is {installed}")
    assert list(ROWS) == families(), "run make models"
    assert list(STACKS) == list(stack_families()), "run make models"


def test_the_page_counts_its_rows_and_leaves_few_untried() -> None:
    counted = []
    for section in PAGE.read_text().split("\n## "):
        runs = [line.split("|")[2].strip() for line in section.splitlines() if line.startswith("| `")]
        if said := re.search(r"^\d+ families: .*?not tried", section, flags=re.M | re.S):
            results = ("plan", "graph", "modules", "refused", "-")
            assert list(map(int, re.findall(r"\d+", said[0]))) == [len(runs), *map(runs.count, results)]
            counted += runs
    assert len(counted) > 300
    assert counted.count("-") <= 0.03 * len(counted)


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
