"""Folders of models with draft layers, and their patched models, which several files of tests share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.draft_engines import EAGLE_LAYERS, MTP, TIMES, loaded
from tests.support.draft_folders import eagle3_folder, mtp_folder
from torch_armllm.model_survey.tiny_models import tiny_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function from a family to its model's folder, the model for references, and settings."""
    root = tmp_path_factory.mktemp("drafts")

    @functools.cache
    def make(family: str) -> tuple[Path, Any, dict[str, Any]]:
        folder = root / family
        if family != "eagle3":
            name, _, drafting = family.partition(TIMES)
            return folder, mtp_folder(folder, name, drafting=int(drafting or 1)), MTP
        model = tiny_model("llama", num_hidden_layers=EAGLE_LAYERS)
        model.save_pretrained(folder)
        eagle3_folder(root / "draft", model)
        return folder, model, {**MTP, "method": "eagle3", "model": str(root / "draft")}

    return make


@pytest.fixture(scope="session")
def models(folders: Any) -> Any:
    return functools.cache(lambda family: (loaded(folders(family)[0]), folders(family)[2]))
