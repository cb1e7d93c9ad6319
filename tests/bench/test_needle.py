"""Facts in long texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.case import run
from bench.quality import needle
from tests.support.tiny_server import checkpoint, tokenizer

TEXT = " ".join(f"Sentence {n} says little." for n in range(400))


def test_texts_hold_their_facts_at_even_depths_and_fit() -> None:
    questions = needle.Haystack(TEXT, tokenizer()).questions(2048, 4, 1, 2)
    assert [question.depth for question in questions] == [0.125, 0.375, 0.625, 0.875]
    bodies = {question.prompt.split("\nWhat is")[0] for question in questions}
    assert len(bodies) == 1  # so that they share a prefill
    (body,) = bodies
    for question in questions:
        assert len(tokenizer()(question.prompt).input_ids) + 16 <= 2048
        assert abs(body.index(question.number) / len(body) - question.depth) < 0.15
    assert "Sentence 200 says" in body and "Sentence 199 says" not in body


@pytest.mark.parametrize("length,wanted", [(600, "no room"), (9000, "longer text")])
def test_lengths_that_do_not_fit_are_refused(length: int, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        needle.Haystack(TEXT, tokenizer()).questions(length, 4, 1, 2)


def test_tables_count_by_length_and_by_depth() -> None:
    questions = [needle.Question("", "", length, depth) for length in (10, 20) for depth in (0.1, 0.5, 0.9)]
    rows = {"none": [True] * 6, "int4": [True, False, False] * 2}
    lines = needle.table(rows, questions).splitlines()
    assert lines[0] == "| | 10 | 20 | all | p |"
    assert lines[2] == "| `none` | 100 ± 0 % | 100 ± 0 % | 100 ± 0 % |  |"
    assert lines[3] == "| `int4` | 33 ± 33 % | 33 ± 33 % | 33 ± 21 % | 0.12 |"
    assert lines[-1].startswith("| `int4` | 100 ± 0 % | 0 ± 0 % | 0 ± 0 % |")


def test_engine_answers_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text, out = checkpoint(tmp_path / "tiny"), tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(TEXT)
    monkeypatch.setattr(needle, "_BEGIN", "")
    monkeypatch.setattr(needle, "_NEEDLE", "{key} {number}.")
    monkeypatch.setattr(needle, "_END", "{key}")
    options = ["--lengths", "256", "--texts", "1", "--needles", "2", "--rows", "none,int4:int8"]
    run(needle.needle, ["--text", str(text), "--model", str(folder), "--json", str(out), *options])
    assert "| `int4:int8` |" in capsys.readouterr().out
    saved = json.loads(out.read_text())
    assert [len(hits) for hits in saved["rows"].values()] == [2, 2] == [len(saved["questions"])] * 2
