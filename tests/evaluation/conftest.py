"""A tiny model, and tasks for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
pytest.importorskip("lm_eval")

from tests.support.tiny_server import checkpoint  # noqa: E402

_CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: data/{name}.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: '{{{{question}}}}'
doc_to_target: '{{{{label}}}}'
doc_to_choice: choices
metric_list:
- metric: acc
- metric: acc_norm
"""
_TEXT = """
task: own_text
tag: own_tag
dataset_path: json
dataset_kwargs:
  data_files:
    test: data/own_text.jsonl
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list:
- metric: word_perplexity
- metric: bits_per_byte
"""
_WORDS = [*"abcdefgh", "the", "sea", "house", "thought", "about", "his", "long", "way", "home", "gray"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks; their data are in a sibling folder."""
    root = tmp_path_factory.mktemp("evaluation")
    tasks, data = root / "tasks", root / "data"
    tasks.mkdir()
    data.mkdir()
    (tasks / "own_choice.yaml").write_text(_CHOICE.format(name="own_choice"))
    (tasks / "own_letters.yaml").write_text(_CHOICE.format(name="own_letters"))
    (tasks / "own_text.yaml").write_text(_TEXT)
    choices = [
        {
            "question": " ".join(_WORDS[n : n + 6]) * (1 + n % 3),
            "choices": [f"to the {_WORDS[(n + k) % 18]} of it"[: 9 + 3 * k] for k in range(4)],
            "label": n % 4,
        }
        for n in range(10)
    ]
    _write(data / "own_choice.jsonl", choices)
    _write(data / "own_letters.jsonl", [{**row, "choices": list("ABCD")} for row in choices])
    _write(data / "own_text.jsonl", [{"text": " ".join(_WORDS[n:] * 3)} for n in range(2)])
    return tasks


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("\n".join(json.dumps(row) for row in rows))
