"""A checkpoint saved on one CPU yields the same bits on another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.arm import saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that the build machine wrote, or a folder that this machine writes."""
    given = os.environ.get("ARMLLM_SAVED")
    made = Path(given) if given else tmp_path_factory.mktemp("saved")
    if not given:
        saved.save(made)
    return made


@pytest.mark.parametrize("family", saved.FAMILIES)
def test_saved_model_is_bit_identical_on_every_processor(folder: Path, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / family)
    assert model.hf_quantizer.report.captured
    found, expected = saved.answers(model), saved.expected(folder, family)
    for name, logits in expected.items():
        assert torch.equal(found[name], logits), name
