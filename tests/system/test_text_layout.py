"""Labeled lines wrap at 80 columns."""

from __future__ import annotations

from torch_armllm.system.text_layout import labeled


def test_long_text_wraps_below_itself() -> None:
    lines = labeled("features", " ".join(f"avx{n}" for n in range(40)), 16).splitlines()
    assert len(lines) > 1 and all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("features        avx0 ")
    assert lines[1].startswith(" " * 16 + "avx")


def test_long_word_stays_whole() -> None:
    path = "/" + 100 * "a"
    assert labeled("library", path, 16).split() == ["library", path]


def test_short_text_is_one_line() -> None:
    assert labeled("cores", 2, 16) == "cores           2"
