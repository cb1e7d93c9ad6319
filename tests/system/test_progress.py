"""Progress bars draw in terminals and notebooks, and print lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
import tqdm.std

from torch_armllm.system.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream, drawn", [(Terminal(), True), (io.StringIO(), False)])
def test_log_file_gets_no_bar(stream: io.StringIO, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress_bar(range(3), desc="Quantizing")) == [0, 1, 2]
    assert ("Quantizing" in stream.getvalue()) == drawn


def test_long_work_gets_lines_in_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setattr(tqdm.std, "time", lambda: now)
    with progress_bar(total=7, desc="Quantizing", unit="layer") as bar:
        bar.set_postfix_str("5 MB", refresh=False)
        for _ in range(7):
            now += 10
            bar.update()
            bar.refresh()  # as a new description does; lines stay rare
    assert stream.getvalue() == (
        "Quantizing: 3/7 layers, 00:30 elapsed, 00:40 left, 5 MB\n"
        "Quantizing: 6/7 layers, 01:00 elapsed, 00:10 left, 5 MB\n"
        "Quantizing: 7/7 layers, 01:10 elapsed, 00:00 left, 5 MB\n"
    )


def test_hidden_bar_draws_nothing_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with progress_bar(total=2, show=False) as bar:
        bar.update(2)
    assert stream.getvalue() == ""


def test_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert not progress_bar(range(3)).disable
