"""Shards of models whose graphs are captured in a way of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra vision")

from tests.support.picture_folders import picture_folder  # noqa: E402
from torch_armllm import patch  # noqa: E402
from torch_armllm.checkpoint.load import load_model  # noqa: E402
from torch_armllm.hf.model_kind import kind_of  # noqa: E402
from torch_armllm.parallel.rank_place import RankPlace  # noqa: E402
from torch_armllm.patching.model_shard import model_shard  # noqa: E402


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_of_paligemma_are_causal_as_its_plan_is(stage: int, tmp_path: Path) -> None:
    """Its modules let the tokens of a text attend to later ones."""
    model = load_model(str(picture_folder(tmp_path, "paligemma")), dtype=torch.float32)
    assert patch(model, None, progress=False).captured
    program = model_shard(kind_of(model), None, RankPlace(stage, 1, 2), None).model.plan.program
    (attention,) = program.named("attention")
    assert attention.integer("ahead") == 0
