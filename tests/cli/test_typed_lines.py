"""Lines that are typed in a terminal: what Tab completes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from torch_armllm.cli.typed_lines import TypedLines

LINES = TypedLines(["/clear", "/exit", "/image"], ["/image"], "help")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cat.png", "cat two.png", ".hidden", "dog.png"):
        (tmp_path / name).touch()
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/one.png").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("/", ["/clear", "/exit", "/image "]),
        ("/i", ["/image "]),
        ("", []),
        ("what", []),
        ("/clear c", []),
        ("/image ca", ["/image cat two.png", "/image cat.png", "/image cats/"]),
        ("/image cat t", ["/image cat two.png"]),
        ("/image  dog", ["/image  dog.png"]),
        ("/image cats/", ["/image cats/one.png"]),
        ("/image ~/do", ["/image ~/dog.png"]),
        ("/image .", ["/image .hidden"]),
        ("/image none/", []),
        ("/image ", ["/image cat two.png", "/image cat.png", "/image cats/", "/image dog.png"]),
    ],
)
def test_completions(line: str, found: list[str]) -> None:
    assert LINES.completions(line) == found


def test_tab_completes_in_a_terminal(folder: Path) -> None:
    """A name with a space is completed to its end."""
    code = (
        "from torch_armllm.cli.typed_lines import TypedLines\n"
        "print(repr(TypedLines(['/image'], ['/image'], 'help').read()))"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, env=environment) as child:
        os.close(theirs)
        told = b""
        while b"> " not in told:
            told += os.read(ours, 1024)
        os.write(ours, b"/im\tcat t\t\n")
        while b"'" not in told:
            told += os.read(ours, 1024)
        assert child.wait(60) == 0
    os.close(ours)
    assert b"'/image cat two.png'" in told
