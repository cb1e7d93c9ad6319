"""Files that go with a message of a chat in the terminal."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torch_armllm.cli import attachments
from torch_armllm.cli.attachments import Attachments

ALL = ("text", "image", "audio", "video")


def whole(part: Mapping[str, Any]) -> None:
    """Reads every part."""


def damaged(part: Mapping[str, Any]) -> None:
    raise ValueError(f"a {part['type']} is damaged")


def test_files_become_parts_in_order(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"pixels")
    (tmp_path / "a.MP3").write_bytes(b"sound")
    (tmp_path / "v.mp4").write_bytes(b"frames")
    attached = Attachments(ALL, whole)
    for name, file in (("audio", "a.MP3"), ("image", "cat.png"), ("video", "v.mp4")):
        assert attached.add(name, str(tmp_path / file)) == file
    assert len(attached) == 3
    kinds = ("audio/mpeg", b"sound"), ("image/png", b"pixels"), ("video/mp4", b"frames")
    urls = [f"data:{kind};base64,{base64.b64encode(content).decode()}" for kind, content in kinds]
    assert attached.take() == [
        {"type": "audio_url", "audio_url": {"url": urls[0]}},
        {"type": "image_url", "image_url": {"url": urls[1]}},
        {"type": "video_url", "video_url": {"url": urls[2]}},
    ]
    assert attached.take() == []


@pytest.mark.parametrize("typed", ["my cat's.wav", '"my cat\'s.wav"', "my\\ cat\\'s.wav", "~/my cat's.wav"])
def test_names_are_taken_as_typed_or_as_a_shell_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    (tmp_path / "my cat's.wav").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Attachments(ALL, whole).add("audio", typed) == "my cat's.wav"


def test_what_cannot_be_attached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.wav").touch()
    (tmp_path / "long.wav").write_bytes(b"123456")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attachments, "MOST_BYTES", 5)
    attached = Attachments(ALL, whole)
    refused = [
        ("image", "", "give a file: /image FILE"),
        ("image", "none.png", "there is no file none.png"),
        ("image", "what's this.png", "there is no file what's this.png"),
        ("image", "x" * 300, f"{'x' * 300} cannot be read: File name too long"),
        ("image", "~no-such-user/a.png", "there is no file ~no-such-user/a.png"),
        ("audio", str(tmp_path), f"{tmp_path} is a folder"),
        ("audio", "empty.wav", "empty.wav has 0 bytes; a file may have 1 to 5"),
        ("audio", "long.wav", "long.wav has 6 bytes; a file may have 1 to 5"),
    ]
    for name, typed, told in refused:
        with pytest.raises(ValueError) as error:
            attached.add(name, typed)
        assert str(error.value) == told
    (tmp_path / "note.wav").write_bytes(b"x")
    attached = Attachments(ALL, damaged)
    with pytest.raises(ValueError, match=r"^note\.wav: a audio_url is damaged$"):
        attached.add("audio", "note.wav")
    assert len(attached) == 0


def test_only_what_the_model_takes_is_offered(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"x")
    texts, images = Attachments(("text",), whole), Attachments(("text", "image"), whole)
    assert (texts.commands, texts.help) == ([], [])
    assert images.commands == ["/image"]
    assert images.help == ["/image FILE adds an image to the next message"]
    for model, name, told in (
        (texts, "image", "this model takes no image, only text"),
        (images, "audio", "this model takes no audio, only text and image"),
    ):
        with pytest.raises(ValueError) as error:
            model.add(name, str(tmp_path / "a.wav"))
        assert str(error.value) == told
