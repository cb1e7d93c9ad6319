"""The Python of the page about transcription runs, on tiny models in the place of those that it names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.tiny_server import tokenizer
from tests.support.whisper_folder import sound, whisper_folder

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/transcribe-and-translate.md"
_BLOCK = re.compile(r"(?P<skipped><!-- not run: .+? -->\n)?^```python\n(?P<code>.*?)^```", re.M | re.S)


def test_the_blocks_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, speech = tmp_path / "t5", tmp_path / "whisper"
    torch.manual_seed(0)
    own = tokenizer()
    own.pad_token = own.eos_token
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(own), decoder_start_token_id=0, pad_token_id=own.eos_token_id, **sizes)
    T5ForConditionalGeneration(config).save_pretrained(texts)
    own.save_pretrained(texts)
    whisper_folder(speech)
    (tmp_path / "speech.wav").write_bytes(sound(2.0))
    monkeypatch.chdir(tmp_path)
    blocks = [match["code"] for match in _BLOCK.finditer(PAGE.read_text()) if not match["skipped"]]
    assert len(blocks) == 2
    names = {"google/flan-t5-base": str(texts), "openai/whisper-base": str(speech)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        namespace: dict[str, object] = {}
        for code in blocks:
            for name, folder in names.items():
                code = code.replace(name, folder)
            exec(code, namespace)
    assert "int8" in capsys.readouterr().out
