"""The newest releases that were tested, and the warning of newer ones."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import torch_armllm
from tests.support.models import tiny
from torch_armllm.hf.releases import NEWEST_TESTED, warn_if_newer

ROOT = Path(__file__).parents[2]


def test_newest_tested_releases_are_those_of_the_tests() -> None:
    pins = (ROOT / ".ci/constraints.txt").read_text()
    (pinned,) = re.findall(r"^transformers==([\d.]+)", pins, re.MULTILINE)
    assert NEWEST_TESTED["transformers"] == pinned
    (torch_row,) = re.findall(
        r"^\| torch \| \S+ \| (\S+) \|", (ROOT / "docs/reference/compatibility.md").read_text(), re.MULTILINE
    )
    assert NEWEST_TESTED["torch"] == torch_row


def test_tested_releases_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEWEST_TESTED:
        part = ".3" if name == "torch" else ""
        monkeypatch.setattr(f"{name}.__version__", NEWEST_TESTED[name] + part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_newer()


@pytest.mark.parametrize("installed", ["6.0.0", "5.99.0.dev0"])
def test_patch_names_a_newer_release_and_the_newest_tested_one(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tested = tiny("llama"), NEWEST_TESTED["transformers"]
    monkeypatch.setattr("transformers.__version__", installed)
    with pytest.warns(UserWarning, match=f"transformers {installed} is newer than {tested}") as caught:
        torch_armllm.patch(model, None, progress=False)
    assert len(caught) == 1


def test_builds_of_torch_are_compared_by_their_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.1.0+cpu")
    with pytest.warns(UserWarning, match=r"torch 3\.1\.0\+cpu is newer than"):
        warn_if_newer()
