"""Third-party checkpoints that are dequantized, and quantized again with a reported error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.checkpoint.formats.test_compressed_tensors import encoder, scheme, settings
from tests.checkpoint.formats.test_gguf import VOCABULARY, write
from tests.support import saved_folders
from tests.support.models import tiny, token_ids
from torch_armllm import ArmInt4Config
from torch_armllm.checkpoint.load import is_third_party, load_model
from torch_armllm.cli.main import main
from torch_armllm.evaluation.loading import load_variant
from torch_armllm.evaluation.variant import Variant
from torch_armllm.quant.modules.linear import QuantLinear


@pytest.fixture
def file(tmp_path: Path) -> tuple[str, Any]:
    """A GGUF file in Q4_1, and the equivalent float model."""
    path = tmp_path / "tiny.gguf"
    return str(path), write(path, "Q4_1")


def compressed(folder: Path) -> Any:
    wanted = scheme(4, 32, True, None)
    written = settings("pack-quantized", wanted)
    return saved_folders.write(folder, "llama", encoder("pack-quantized", wanted), written, hidden_size=128)


def test_file_is_dequantized_exactly(file: tuple[str, Any]) -> None:
    path, expected = file
    model = load_model(path, torch.float32, dequantize=True)
    assert not torch_armllm.is_patched(model) and model.config.tie_word_embeddings
    own = expected.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name]), name
    ids = token_ids(1, 9) % VOCABULARY
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected(ids).logits, atol=1e-5)


def test_folder_is_dequantized_exactly(tmp_path: Path) -> None:
    expected = compressed(tmp_path)
    model = load_model(str(tmp_path / "quantized"), torch.float32, dequantize=True)
    own = expected.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name]), name


def test_report_has_the_error_of_requantization(file: tuple[str, Any]) -> None:
    path, expected = file
    model: Any = torch_armllm.load(path, "g32i", dtype=torch.float32, requantize=True)
    report = model.hf_quantizer.report
    errors = {layer.name: layer.error for layer in report.quantized}
    name = "model.layers.1.mlp.down_proj"
    module, wanted = model.get_submodule(name), expected.get_submodule(name).weight
    assert isinstance(module, QuantLinear) and module.scheme == "g32i"
    found = float((module.dequantize() - wanted).norm().detach() / wanted.norm().detach())
    assert errors[name] == pytest.approx(found, rel=1e-3) and 0.03 < found < 0.12
    assert "errors are against the weights that gguf stored" in report.notes
    assert report.captured


def test_command_writes_a_folder_that_loads(
    file: tuple[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compressed(tmp_path / "ct")
    source, out = tmp_path / "ct" / "quantized", tmp_path / "out"
    tokenizer = torch_armllm.checkpoint.load.load_tokenizer("smollm2")
    tokenizer.save_pretrained(source)
    assert (
        is_third_party(file[0])
        and is_third_party(str(source))
        and not is_third_party(str(tmp_path / "ct" / "float"))
    )
    main(["quantize", str(source), str(out), "--quantization", "g64", "--json"])
    assert f"{source} is quantized already, and is rounded once more" in caplog.text
    model: Any = torch_armllm.load(str(out), dtype=torch.float32)
    anew: Any = torch_armllm.load(str(source), "g64", dtype=torch.float32, requantize=True)
    assert model.model.layers[0].mlp.down_proj.scheme == "g64"
    ids = token_ids(1, 5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, anew(ids).logits)
    assert main(["quantize", str(source), str(out)]) == 2  # out is not empty
    assert main(["quantize", str(source), str(tmp_path / "new"), "--method", "gptq"]) == 2
    with pytest.raises(ValueError, match="are packed as 'g64' already"):
        torch_armllm.load(str(out), "g32i", requantize=True)


def test_scheme_applies_to_float_checkpoints(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model: Any = torch_armllm.load(str(tmp_path), "int8")
    assert model.model.layers[0].mlp.down_proj.scheme == "int8"


def test_evaluation_dequantizes_the_baseline(file: tuple[str, Any]) -> None:
    plain, records = load_variant(file[0], Variant.parse("f32"))
    assert not torch_armllm.is_patched(plain) and not any(record.quantized for record in records)
    anew, _ = load_variant(file[0], Variant.parse("int4-g32i"), "float32")
    assert anew.model.layers[0].mlp.down_proj.scheme == "g32i"
    saved, _ = load_variant(file[0], Variant.parse("saved"), "float32")
    assert saved.model.layers[0].mlp.down_proj.scheme == "g32m"


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "torchao"])
def test_from_pretrained_names_the_remedy(method: str, tmp_path: Path) -> None:
    stored = {
        "gptq": {"bits": 4, "group_size": 32},
        "awq": {"bits": 4, "group_size": 32, "version": "gemm"},
        "compressed-tensors": settings("pack-quantized", scheme(4, 32, True, None)),
        "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}},
    }[method]
    tiny("llama").save_pretrained(tmp_path)
    saved_folders.configure(tmp_path, {"quant_method": method, **stored})
    with pytest.raises(ValueError, match=rf"quantized by {method} already.*torch_armllm\.load\(folder"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ArmInt4Config())
