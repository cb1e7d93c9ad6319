"""Tables of several versions are merged into the families that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_armllm.model_survey.versions import differing, read_tables


def row(family: str, runs: str, **media: str) -> dict[str, object]:
    return {"family": family, "runs": runs, "reach": "attention interface", "media": media}


def test_families_that_differ_have_a_column_for_each_version(tmp_path: Path) -> None:
    (tmp_path / "old").write_text(json.dumps([row("llama", "plan"), row("llava", "plan", image="no tower")]))
    now = [row("llama", "plan"), row("llava", "plan", image="yes"), row("new", "graph")]
    (tmp_path / "now").write_text(json.dumps(now))
    text = differing(read_tables([f"5.21.0={tmp_path}/old", f"5.24.0={tmp_path}/now"]))
    assert text.splitlines() == [
        "| family | kind | 5.21.0 | 5.24.0 |",
        "|---|---|---|---|",
        "| `llava` | attention interface | plan | plan, image |",
        "| `new` | attention interface | absent | graph |",
        "",
        "2 of 3 families differ.",
    ]


@pytest.mark.parametrize("text", ["{}x", "[1]", '[{"family": "a"}]'])
def test_a_file_that_is_no_table_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match="file is no table"):
        read_tables([f"1={tmp_path}/file"])


@pytest.mark.parametrize("given", ["file", "=file", "5.24.0="])
def test_a_table_without_its_version_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is not VERSION=FILE"):
        read_tables([given])
