"""GGUF files of tiny models, written by the ``gguf`` package, in every type that a scheme holds."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_armllm
from tests.support.format_results import relative, with_rounded_inputs
from tests.support.gguf_files import encode
from tests.support.models import token_ids
from torch_armllm import Recipe, load
from torch_armllm.checkpoint.formats.gguf import read_file
from torch_armllm.checkpoint.formats.gguf_file import GgufFile
from torch_armllm.checkpoint.load import load_model
from torch_armllm.quant.modules.linear import QuantLinear

KINDS = gguf.GGMLQuantizationType
HIDDEN, HEADS, KV_HEADS, INT8_SCHEME, LAYERS, VOCABULARY = 256, 4, 2, 512, 2, 64
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Permutes rows to llama.cpp's rotary order."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(path: Path, kind: str, embedding: str = "Q8_0") -> Any:
    """Writes a tiny Llama with every matrix of one type, and returns the equivalent float model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INT8_SCHEME,
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INT8_SCHEME)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    for name, weight in model.model.state_dict().items():
        *_, layer, rest = (name.removesuffix(".weight").partition("layers.")[2] or "-.").split(".", 1)
        target = {"embed_tokens.weight": "token_embd", "norm.weight": "output_norm"}.get(name)
        target = target or f"blk.{layer}.{NAMES[rest]}"
        if weight.dim() == 1:
            writer.add_tensor(f"{target}.weight", weight.numpy())
            continue
        type_ = KINDS[embedding if target == "token_embd" else kind]
        heads = HEADS if target.endswith("attn_q") else KV_HEADS if target.endswith("attn_k") else 0
        rows = permuted(weight, heads) if heads else weight
        raw, stands_for = encode(rows.contiguous(), type_.name)
        writer.add_tensor(f"{target}.weight", raw, raw_dtype=type_)
        if heads:
            stands_for = stands_for.view(heads, -1, 2, HIDDEN).transpose(1, 2).reshape(weight.shape)
        weight.copy_(stands_for)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q3_K", "IQ1_S"])
def test_integers_are_kept(kind: str, tmp_path: Path) -> None:
    """Checks the row order, the head from the embedding's integers, and logits up to INT8 activations."""
    expected = write(tmp_path / "tiny.gguf", kind)
    model: Any = load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32)
    report = model.hf_quantizer.report
    assert report.captured and not report.notes[1:], str(report)
    matrices = 0
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and name != "lm_head":
            wanted = expected.get_submodule(name).weight
            assert torch.allclose(module.dequantize(), wanted, rtol=1e-6, atol=1e-6), name
            matrices += 1
    assert matrices >= 4 * LAYERS
    assert model.lm_head.scheme == "int8g32"
    assert torch.equal(model.lm_head.dequantize(), expected.lm_head.weight)
    assert torch.equal(model.get_input_embeddings().weight, expected.get_input_embeddings().weight)
    with torch.no_grad():
        ids = token_ids(2, 9) % VOCABULARY
        got, wanted = model(ids).logits, expected(ids).logits
    assert float((got - wanted).norm() / wanted.norm()) < 0.06
    exact_head: Any = load(str(tmp_path / "tiny.gguf"), Recipe(head=None), dtype=torch.float32, fuse=False)
    with torch.no_grad():
        ids = token_ids(1, 6) % VOCABULARY  # so few tokens that group scales are not folded
        assert relative(exact_head(ids).logits, with_rounded_inputs(expected)(ids).logits) < 2e-3


def test_rounded_types_compute_as_their_integers(tmp_path: Path) -> None:
    expected = write(tmp_path / "tiny.gguf", "Q6_K", "Q6_K")
    model: Any = load(str(tmp_path / "tiny.gguf"), Recipe(head=None), dtype=torch.float32, fuse=False)
    assert torch.equal(model.get_input_embeddings().weight, expected.get_input_embeddings().weight)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            weight = expected.get_submodule(name).weight
            assert relative(module.dequantize().flatten(), weight.flatten()) < 0.008
            weight.data.copy_(module.dequantize())
    torch_armllm.patch(model)
    with torch.no_grad():
        ids = token_ids(1, 6) % VOCABULARY
        assert relative(model(ids).logits, with_rounded_inputs(expected)(ids).logits) < 2e-3


def test_a_file_is_not_asked_for_at_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(source: str, **options: Any) -> None:
        raise AssertionError(f"{source} is asked for")

    write(tmp_path / "tiny.gguf", "Q8_0", "Q8_0")
    monkeypatch.setattr("transformers.GenerationConfig.from_pretrained", asked)
    load(str(tmp_path / "tiny.gguf"), Recipe(head=None), dtype=torch.float32, fuse=False)


def test_pages_of_the_file_are_released_after_loading(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "Q8_0")
    file = GgufFile(str(tmp_path / "tiny.gguf"))
    whole = file.floats("blk.0.ffn_up.weight")
    assert resident(tmp_path / "tiny.gguf") > 0
    file.release()
    assert resident(tmp_path / "tiny.gguf") == 0
    assert torch.equal(file.floats("blk.0.ffn_up.weight"), whole)


def resident(path: Path) -> int:
    """Returns the resident kilobytes of a file in this process."""
    _, _, rest = Path("/proc/self/smaps").read_text().partition(f" {path}\n")
    return int(rest.partition("Rss:")[2].split()[0])


def test_embeddings_are_decoded_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, rows = write(tmp_path / "tiny.gguf", "Q4_0", "Q6_K"), []
    monkeypatch.setattr("torch_armllm.checkpoint.formats.integer_weight.CHUNK", 16 * HIDDEN)
    floats = GgufFile.floats

    def decode(self: GgufFile, name: str, part: slice = slice(None)) -> Tensor:
        found = floats(self, name, part)
        if name == "token_embd.weight":
            rows.append(len(found))
        return found

    monkeypatch.setattr(GgufFile, "floats", decode)
    model: Any = load(str(tmp_path / "tiny.gguf"), Recipe(head=None), dtype=torch.float32, fuse=False)
    assert rows == [16] * (VOCABULARY // 16)
    assert torch.equal(model.get_input_embeddings().weight, expected.get_input_embeddings().weight)


@pytest.mark.parametrize("embedding", ["F16", "Q6_K"])
def test_embedding_of_another_type_stays_tied(embedding: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "tiny.gguf", "Q4_0", embedding)
    model: Any = load_model(str(tmp_path / "tiny.gguf"), dtype=torch.bfloat16)
    assert model.config.tie_word_embeddings
    assert model.lm_head.scheme == "int8"
    with torch.no_grad():
        ids = token_ids(1, 5) % VOCABULARY
        got, wanted = model(ids).logits.float(), expected(ids).logits
    assert float((got - wanted).norm() / wanted.norm()) < 0.05


def test_other_types_are_requantized_and_reported(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "IQ2_XS")
    checkpoint = read_file(str(tmp_path / "tiny.gguf"))
    weight = checkpoint.weights["model.layers.0.mlp.up_proj.weight"][...]
    assert weight.scheme == "g32m"
    (note,) = checkpoint.requantizer.notes
    assert "1 matrices of IQ2_XS were rounded to g32m: relative error 0." in note


def test_damaged_and_incomplete_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "Q4_0")
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    with pytest.raises(ValueError, match="damaged or no GGUF file"):
        load_model(str(path))
    path.write_bytes(b"no file at all" + whole)
    with pytest.raises(ValueError, match="damaged or no GGUF file"):
        load_model(str(path))
    path.write_bytes(whole.replace(b"blk.1.attn_v.weight", b"blk.1.attn_w.weight"))
    with pytest.raises(ValueError, match="has no model.layers.1.self_attn.v_proj.weight"):
        load_model(str(path))
    path.write_bytes(whole.replace(b"general.architecture", b"general.architectury"))
    with pytest.raises(ValueError, match="damaged or no GGUF file"):
        load_model(str(path))


@pytest.mark.parametrize(("length", "message"), [(2**40, "has 1099511627776 items"), (2**20, "cut short")])
def test_long_arrays_are_not_counted(length: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "Q4_0")
    whole = bytearray(path.read_bytes())
    place = whole.index(b"llama.block_count") + len("llama.block_count")
    whole[place : place + 16] = struct.pack("<IIQ", 9, 10, length)  # an array of words of 64 bits
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=f"damaged or no GGUF file .*{message}"):
        load_model(str(path))


def test_blocks_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "Q4_0")
    whole = bytearray(path.read_bytes())
    place = whole.index(b"llama.block_count") + len("llama.block_count") + 4
    whole[place : place + 4] = struct.pack("<I", 900)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="it has 900 blocks, and its tensors are of 2: the file is"):
        load_model(str(path))


def _offset_at(whole: bytes, name: str) -> int:
    """Returns the place of a tensor's offset in a file's header."""
    at = whole.index(name.encode()) + len(name)
    return at + 8 + 8 * int.from_bytes(whole[at : at + 4], "little")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old, other: other, r"begins at byte \d+, and \S+ before it ends at \d+: the file is damaged"),
        (
            lambda old, other: old - 32,
            r"begins at byte \d+, and \S+ before it ends at \d+: the file is damaged",
        ),
        (lambda old, other: old + 4, r"begins at byte \d+, and a multiple of 32 is expected"),
        (lambda old, other: 1 << 40, r"is damaged or no GGUF file"),
    ],
)
def test_offsets_that_overlap_or_leave_the_file(change: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, "Q4_1")
    whole = bytearray(file.read_bytes())
    places = [_offset_at(whole, f"blk.{layer}.ffn_up.weight") for layer in range(2)]
    old, other = (int.from_bytes(whole[place : place + 8], "little") for place in places)
    whole[places[0] : places[0] + 8] = change(old, other).to_bytes(8, "little")
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=message):
        load(str(file), fuse=False)


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, "Q4_1")
    tensor = GgufFile(str(file)).tensors["blk.1.ffn_up.weight"]
    whole = bytearray(file.read_bytes())
    begin = int(tensor.data_offset)
    whole[begin : begin + 2] = np.array([np.nan], np.float16).tobytes()
    file.write_bytes(whole)
    with pytest.raises(
        ValueError, match=r"blk.1.ffn_up.weight in .* has a scale that is NaN, infinite or above"
    ):
        load(str(file), fuse=False)
