"""The Python of the page about sound runs, on a tiny model in the place of the one that it names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
pytest.importorskip("soxr", reason="needs the extra audio")

from tests.support.sound_folders import sound, sound_folder  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/sound.md"
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```", re.M | re.S)


def test_the_blocks_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sound_folder(tmp_path / "model")
    soundfile.write(tmp_path / "speech.wav", sound(0), 16_000, subtype="FLOAT")
    monkeypatch.chdir(tmp_path)
    blocks = [match["code"] for match in _BLOCK.finditer(PAGE.read_text())]
    assert len(blocks) == 3
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        namespace: dict[str, object] = {}
        for code in blocks:
            code = code.replace("Qwen/Qwen2-Audio-7B-Instruct", str(folder)).replace("/DIR", str(tmp_path))
            exec(code, namespace)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and len(set(lines[:3])) == 1
