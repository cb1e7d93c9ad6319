"""Texts of models that also take images run as native plans, and have the modules' logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from torch_armllm import patch
from torch_armllm.hf.cache_names import cache_of, usual_name
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config, tiny_ids
from torch_armllm.patching.state import patch_state

_FAMILIES = (
    "git",
    *(
        pytest.param(family, marks=pytest.mark.thorough)
        for family in ("kimi_k25", "muse_glimmer", "glm5_next")
    ),
)
"""A mask of blocks; placeholders that become row 0; latents without positions beside masks of ones."""


@pytest.mark.parametrize("family", _FAMILIES)
def test_texts_run_as_plans(family: str) -> None:
    known = AutoModelForImageTextToText._model_mapping._config_mapping
    if family not in known:
        pytest.skip(f"this release of transformers has no {family}")
    model = build_tiny(AutoModelForImageTextToText, tiny_config(family))
    report = patch(model, "int8", progress=False)
    assert report.captured and not [note for note in report.notes if "node by node" in note], report
    for length in (3, 21, 40):
        ids = tiny_ids(1, length, seed=length)
        placeholder = getattr(model.config, "image_token_id", None)
        if placeholder is not None:
            ids[0, 1] = placeholder  # as plain text: the modules say what it is
        _compare(model, ids)


@torch.no_grad()
def _compare(model: torch.nn.Module, ids: Tensor) -> None:
    """Compares logits of a prompt, and of a token after it, with those of the modules."""
    state = patch_state(model)
    with state.forward.by_modules("they are compared with"):
        expected = model(input_ids=ids).logits
    given = ids.clone()
    prompt = model(input_ids=ids[:, :-1], use_cache=True)
    last = model(input_ids=ids[:, -1:], **{usual_name(): cache_of(prompt)})
    found = torch.cat([prompt.logits, last.logits], 1)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.median()) < 0.05 and torch.equal(ids, given)
