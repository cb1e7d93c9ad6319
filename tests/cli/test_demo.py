"""The demo: its parts, and all of it on the bundled model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_armllm.checkpoint import load
from torch_armllm.cli.demo_view import SideBySide
from torch_armllm.cli.main import main


def test_columns_stream_the_right_side_next_to_the_left(capsys: pytest.CaptureFixture[str]) -> None:
    columns = SideBySide("one two three four five", 9)
    columns.put("aaaa bbbb ")
    assert capsys.readouterr().out == ""
    columns.put("cccc dddd")
    assert capsys.readouterr().out == "  one two   │ aaaa bbbb\n"
    columns.put(" eeee\nf")
    assert capsys.readouterr().out.splitlines() == ["  three     │ cccc dddd", "  four five │ eeee"]
    columns.end()
    assert capsys.readouterr().out == "            │ f\n".replace("            │", "            │")


def test_columns_print_the_rest_of_a_longer_left_side(capsys: pytest.CaptureFixture[str]) -> None:
    columns = SideBySide("one two three four five", 9)
    columns.put("short")
    columns.end()
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "  one two   │ short",
        "  three     │",
        "  four five │",
    ]


@pytest.mark.model
def test_bundled_model_uses_its_chat_template(smollm2_dir: Path) -> None:
    tokenizer = load.load_tokenizer("smollm2")
    message = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("Hello world")["input_ids"] == [19556, 905]
    model = load.load_model("smollm2")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.model
def test_demo_shows_both_precisions(smollm2_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "What is the capital of France?"
    assert main(["demo", "--model", "smollm2", "--prompt", prompt, "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Paris.*│.*Paris", out)
    assert "int4_linear" in out
    assert "int8_linear" in out
    assert len(re.findall(r"[1-9][0-9.]* tokens/s", out)) >= 3
    assert "times as fast" in out
