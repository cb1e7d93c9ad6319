"""The Python of the page about pictures runs, on a tiny model in the place of the one that it names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs the extra vision")

from tests.support.picture_folders import picture, picture_folder  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/pictures.md"
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```", re.M | re.S)


def test_the_blocks_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = picture_folder(tmp_path / "model", "llava")
    picture(0).save(tmp_path / "cat.png")
    monkeypatch.chdir(tmp_path)
    blocks = [match["code"] for match in _BLOCK.finditer(PAGE.read_text())]
    assert len(blocks) == 3
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        namespace: dict[str, object] = {}
        for code in blocks:
            code = code.replace("llava-hf/llava-1.5-7b-hf", str(folder)).replace("/DIR", str(tmp_path))
            exec(code, namespace)
    assert len(capsys.readouterr().out.split()) > 2
