"""A tiny model, and tasks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
pytest.importorskip("lm_eval")

from tests.support.evaluation_tasks import write_tasks  # noqa: E402
from tests.support.tiny_server import checkpoint  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def without_machine_info() -> Iterator[None]:
    """Leaves out what lm-eval finds out about the machine: it runs pip and more, for a second each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks; their data are in a sibling folder."""
    return write_tasks(tmp_path_factory.mktemp("evaluation"))
