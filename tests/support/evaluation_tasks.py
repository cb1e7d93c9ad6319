"""Tasks of lm-eval for tiny models."""

from __future__ import annotations

import json
from pathlib import Path

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


def write_tasks(root: Path) -> Path:
    """Writes a folder of tasks and returns it; their data are in a sibling folder."""
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
