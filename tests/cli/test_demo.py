"""The demo: its parts, and all of it on the bundled model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.models import tiny, token_ids
from tests.support.tiny_server import checkpoint
from torch_armllm.checkpoint import load
from torch_armllm.cli.demo_view import reply_logits
from torch_armllm.cli.main import main
from torch_armllm.cli.side_by_side import SideBySide
from torch_armllm.cli.timed_completion import Completion


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


_DIVERGENCE = r"on the (\d+) tokens of the bfloat16 replies: KL divergence (\d\.\d{4}) nats, (\d+\.\d)% with"


@pytest.mark.model
def test_demo_shows_both_precisions(smollm2_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "What is the capital of France, and what is it known for?"
    assert main(["demo", "smollm2", "--prompt", prompt, "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"transformers bfloat16 +│ patched, the file's own INT4\n", out)
    assert re.search(r"Paris.*│.*Paris", out)
    assert re.search("int4_linear +g32m .*\n.*int4_linear +int8g32 ", out)
    assert "the 4-bit integers of smollm2's own file, loaded in" in out
    assert len(re.findall(r"[1-9][0-9.]* tokens/s", out)) >= 3
    assert "times as fast" in out
    ((tokens, divergence, same),) = re.findall(_DIVERGENCE, out)
    assert 2 <= int(tokens) <= 12 and 0 < float(divergence) < 0.2 and float(same) >= 50


def test_demo_quantizes_other_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(checkpoint(tmp_path))
    prompts = ["--prompt", "a short one", "--prompt", "and another"]
    assert main(["demo", folder, "--max-new-tokens", "7", *prompts]) == 0
    out = capsys.readouterr().out
    assert re.search(r"transformers bfloat16 +│ patched, INT4\n", out)
    ((tokens, divergence, _),) = re.findall(_DIVERGENCE, out)
    assert 2 <= int(tokens) <= 14 and float(divergence) > 0


def test_reply_is_scored_where_its_tokens_are_predicted() -> None:
    model = tiny("llama")
    ids = token_ids(1, 9)
    with torch.no_grad():
        expected = model(ids).logits[0, 4:8]
    got = reply_logits(model, Completion("", ids, tokens=4, tokens_per_second=1.0))
    assert torch.allclose(got, expected, atol=1e-5)
    assert reply_logits(model, Completion("", ids, 0, 0.0)).shape == (0, expected.shape[1])
