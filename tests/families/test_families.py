"""Every causal language model of transformers, tiny and random, before and after `patch`."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import torch_armllm
from tests.parity import CAPTURED, apart_in_own_forward, differences, expected, steps
from torch_armllm import quant
from torch_armllm.coverage.table import describe
from torch_armllm.coverage.tiny import families, tiny_model
from torch_armllm.quant.reference import emulate

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEST = ["plan", "graph", "modules", "-"]
ROWS = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}


NOT_RUN = {
    "blt": "transformers' own forward of it looks for num_hidden_layers, which its configuration lacks",
    "xlstm": "transformers' own forward of it takes whole chunks of tokens only",
}
"""Families whose quantised model is not run, and why."""
CHANGES_ITSELF = "rwkv"
"""Its first forward rescales float weights in place; the run that `patch` does by default is that one."""


def skip_what_cannot_run(family: str) -> None:
    if "| - |" in ROWS[family]:
        pytest.skip("the page says why it has no tiny model")
    if family in NOT_RUN:
        pytest.skip(NOT_RUN[family])


def runs_on_page(family: str) -> str:
    return ROWS[family].split("|")[2].strip()


def test_the_page_lists_every_family() -> None:
    assert list(ROWS) == families(), "run make models"


@pytest.mark.parametrize("family", CAPTURED)
def test_unquantised_steps_are_the_models_own(family: str) -> None:
    model = tiny_model(family)
    wanted = expected(model)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    for name, (_, largest) in differences(steps(model), wanted).items():
        assert largest < 3e-4, name


@pytest.mark.parametrize("family", families())
def test_quantised_steps_are_those_of_the_emulation(family: str) -> None:
    skip_what_cannot_run(family)
    model = tiny_model(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quant.quantize(model, progress=False, importance=family == CHANGES_ITSELF)
        twin = emulate(model)
        report = torch_armllm.patch(model, progress=False)
    now = describe(family, report)
    assert BEST.index(now.runs) <= BEST.index(runs_on_page(family)), f"{now}; run make models"
    if report.captured:
        found = differences(steps(model), expected(twin))
    else:
        assert family not in CAPTURED, report.capture_reason
        found = apart_in_own_forward(model, twin)
    # absorbed latent attention rounds queries and what is attended to, the emulation rounds the latents
    usual, worst = 1e-3, 0.1
    for name, (most, largest) in found.items():
        # rounding may carry an activation over to the next integer, and a token to another expert
        assert most < usual, name
        assert largest < worst, name
