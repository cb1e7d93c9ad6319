"""The page that says where a kind of model is added: it has the files of a real change, and they suffice."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/add-a-kind-of-model.md"
PLACES = re.findall(r"^\| \[?`([^`]+)`", PAGE.read_text(), re.M)
SPEAKERS = (
    "torch_armllm/hf/model_kind.py",
    "torch_armllm/patching/forwards/calls.py",
    "torch_armllm/patching/forwards/decoder_calls.py",
    "torch_armllm/patching/forwards/text_calls.py",
    "torch_armllm/patching/generation/token_loop.py",
    "tests/patching/test_token_inputs.py",
)
"""Files of a change by which a decoder's steps are given a number for each token: who speaks it."""
_FIELDS = "is_encoder_decoder|vision_config|max_position_embeddings|pad_token_id"
QUESTIONS = re.compile(
    rf"""config[^\n]*, ["']({_FIELDS})["'], |model\.can_generate\(|input_ids["'] in inspect"""
)
CARRIED_TO = (
    *("capture", "checkpoint", "engine", "llm", "lora", "patching"),
    *("plan", "pooling", "quant", "server", "speech"),
)


def test_the_places_are_there() -> None:
    assert len(PLACES) >= 9
    missing = [place for place in PLACES if not any(ROOT.glob(place))]
    assert not missing


def test_a_change_is_in_the_places() -> None:
    assert not [file for file in SPEAKERS if not any(fnmatchcase(file, place) for place in PLACES)]


def test_no_one_else_asks_for_the_kind() -> None:
    files = [path for folder in CARRIED_TO for path in (ROOT / "torch_armllm" / folder).rglob("*.py")]
    assert files and not [path for path in files if QUESTIONS.search(path.read_text())]
