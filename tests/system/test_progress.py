"""Progress bars draw in terminals and notebooks only."""

from __future__ import annotations

import io
import sys

import pytest

from torch_armllm.system.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream, drawn", [(Terminal(), True), (io.StringIO(), False)])
def test_log_file_gets_no_bar(stream: io.StringIO, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress_bar(range(3), desc="Quantizing")) == [0, 1, 2]
    assert ("Quantizing" in stream.getvalue()) == drawn


def test_hidden_bar_draws_nothing_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with progress_bar(total=2, show=False) as bar:
        bar.update(2)
    assert stream.getvalue() == ""


def test_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert not progress_bar(range(3)).disable
