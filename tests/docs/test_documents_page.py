"""The programs of the page about documents run, on rendered pages and a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the extra vision")

from PIL import Image, ImageDraw  # noqa: E402

from docs.examples import pages_by_server, pages_to_markdown  # noqa: E402
from tests.support.picture_folders import picture_folder  # noqa: E402
from tests.support.server_live import live  # noqa: E402
from torch_armllm.llm.async_llm import AsyncLLM  # noqa: E402
from torch_armllm.llm.llm import LLM  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {"kv_cache_memory": 4 << 20, "progress": False}
SETTINGS |= {"quantization": None, "dtype": "float32"}
ASKED = ["--prompt", "what is this", "--max-tokens", "40"]


def page(*lines: str) -> Image.Image:
    """Returns a page of text."""
    made = Image.new("RGB", (120, 160), "white")
    ImageDraw.Draw(made).multiline_text((8, 8), "\n".join(lines), fill="black", font_size=28)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model that ends the text of each page at another place."""
    folder = picture_folder(tmp_path_factory.mktemp("llava"), "llava")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [2, 19, 93]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of four pages, one of them damaged, and a file that is none."""
    folder = tmp_path_factory.mktemp("pages")
    words = ("Invoice", "abcdefg"), ("Total: 12", "bcdefg"), ("Yours", "defg"), ("Dear Sir", "cdefg")
    for number, (title, lines) in enumerate(words):
        page(title, *lines).save(folder / f"{number}.png")
    whole = (folder / "2.png").read_bytes()
    (folder / "2.png").write_bytes(whole[: len(whole) // 2])
    (folder / "notes.txt").write_text("none")
    return folder


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Has the program load a model once, in float32; returns it."""
    made: list[LLM] = []

    def load(*arguments: Any, **settings: Any) -> LLM:
        if not made:
            made.append(LLM(*arguments, **settings, **SETTINGS))
        return made[0]

    monkeypatch.setattr(pages_to_markdown, "LLM", load)
    return made


def written(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().split() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(model: Path, pages: Path) -> dict[str, list[str]]:
    """Returns the words of each page that can be read, as the model alone writes them."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    own = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    texts = {}
    for number in (0, 1, 3):
        image = Image.open(pages / f"{number}.png")
        prompt = "user : <image> what is this  assistant :"
        inputs = processor(text=[prompt], images=[[image]], return_tensors="pt", add_special_tokens=False)
        tokens = own.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert 2 <= len(tokens) < 40
        texts[f"{number}.png.md"] = processor.tokenizer.decode(tokens[:-1], skip_special_tokens=True).split()
    assert len({len(words) for words in texts.values()}) == 3
    return texts


@pytest.mark.usefixtures("loaded")
def test_a_folder_is_read_in_batches(
    model: Path, pages: Path, tmp_path: Path, alone: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(pages), str(tmp_path), "--model", str(model), *ASKED, "--batch", "3"]
    assert pages_to_markdown.main(command) == 1
    assert written(tmp_path) == alone
    told = capsys.readouterr()
    assert re.search(r"^2\.png: an image is damaged", told.err, re.M)
    assert told.out.splitlines() == ["3 of 4 pages", "4 of 4 pages"]
    (tmp_path / "1.png.md").unlink()
    assert pages_to_markdown.main([*command, "--max-tokens", "1"]) == 1  # of pages that are not there yet
    told = capsys.readouterr()
    assert "1.png: its text is longer than 1 tokens" in told.err
    assert told.out.splitlines() == ["2 of 2 pages"]
    assert written(tmp_path) == {name: words for name, words in alone.items() if name != "1.png.md"}


def test_a_folder_is_read_by_a_server(
    model: Path, pages: Path, tmp_path: Path, alone: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = AsyncLLM(str(model), **SETTINGS)
    with live(llm) as server:
        command = [str(pages), str(tmp_path), "--server", server.base, *ASKED, "--requests", "3"]
        assert pages_by_server.main(command) == 1
        assert written(tmp_path) == alone
        told = capsys.readouterr().err
        assert re.search(r"^2\.png: .*an image is damaged", told, re.M) and told.count(".png: ") == 1
        (tmp_path / "1.png.md").unlink()
        assert pages_by_server.main([*command, "--max-tokens", "1"]) == 1
        assert "1.png: its text is longer than 1 tokens" in capsys.readouterr().err
    llm.shutdown()
