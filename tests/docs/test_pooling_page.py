"""The Python of the page about pooling models runs, on a tiny model in the place of the one that it names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from tests.support.pooling_folders import pooling_folder, with_modules

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/embed-and-classify.md"
_NAME = re.compile("Qwen/Qwen3-Embedding-0.6B|BAAI/bge-base-en-v1.5")
_BLOCK = re.compile(r"(?P<skipped><!-- not run: .+? -->\n)?^```python\n(?P<code>.*?)^```", re.M | re.S)


def test_the_blocks_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    prompts = {"prompts": {"query": "Query: "}}
    pooling_folder(tmp_path, "embed")
    with_modules(
        tmp_path,
        {"Pooling": {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}, "Normalize": {}},
        config_sentence_transformers=prompts,
    )
    blocks = [match["code"] for match in _BLOCK.finditer(PAGE.read_text()) if not match["skipped"]]
    assert len(blocks) == 4
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        namespace: dict[str, object] = {}
        for code in blocks:
            exec(_NAME.sub(str(tmp_path), code), namespace)
    assert "int8" in capsys.readouterr().out
