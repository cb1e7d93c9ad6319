"""Small valid checkpoints, one of each format."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoint.formats import test_awq, test_gguf, test_gptq, test_mxfp4
from tests.support import saved_folders
from tests.support.models import tiny
from torch_armllm import Recipe
from torch_armllm.quant.inplace import quantize


def _gptq(folder: Path) -> Path:
    options = (32, False, 1, True)
    saved_folders.write(folder, "qwen2", test_gptq.encoder(*options), test_gptq.settings(*options))
    return folder / "quantized"


def _awq(folder: Path, version: str = "gemm") -> Path:
    encode, settings = test_awq.encoder(32, version), test_awq.settings(32, version)
    saved_folders.write(folder, "llama", encode, settings)
    return folder / "quantized"


def encode_compressed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Encodes a weight as compressed-tensors packs 4 bits with zero points, in groups of 32."""
    parts = weight.unflatten(1, (-1, 32))
    scales = ((parts.amax(2) - parts.amin(2)) / 15).bfloat16()
    zeros = (-parts.amin(2) / scales.float()).round().clamp(0, 15)
    q = (parts / scales.float()[..., None]).round().add(zeros[..., None]).clamp(0, 15)
    return {
        "weight_packed": test_awq.pack_inputs(q.flatten(1)),
        "weight_scale": scales,
        "weight_zero_point": test_awq.pack_inputs(zeros.t().contiguous()).t(),
        "weight_shape": torch.tensor(weight.shape),
    }, ((q - zeros[..., None]) * scales.float()[..., None]).flatten(1)


COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head"],
}


def _compressed(folder: Path) -> Path:
    saved_folders.write(folder, "llama", encode_compressed, COMPRESSED, attention_bias=True)
    return folder / "quantized"


def _torchao(folder: Path) -> Path:
    from tests.checkpoint.formats import test_torchao  # imports torchao, which takes seconds

    test_torchao.save(folder, "int4, asymmetric")
    return folder / "quantized"


def _mxfp4(folder: Path) -> Path:
    test_mxfp4.write(folder, scheme="int8g32")
    return folder / "quantized"


def _gguf(folder: Path) -> Path:
    with torch.no_grad():
        test_gguf.write(folder / "tiny.gguf", "Q4_1")
    return folder / "tiny.gguf"


def _saved(folder: Path) -> Path:
    model = tiny("llama", torch.bfloat16, tie_word_embeddings=True)
    quantize(
        model,
        Recipe(overrides={"*.o_proj": "g32", "*.down_proj": None}, method="rtn", importance=False),
        progress=False,
    )
    model.save_pretrained(folder / "saved")
    return folder / "saved"


def _experts(folder: Path) -> Path:
    model = tiny("qwen3_moe", num_experts=4)
    quantize(model, Recipe("g64z", method="rtn", importance=False), progress=False)
    model.save_pretrained(folder / "saved", max_shard_size="100KB")
    return folder / "saved"


def _floats(folder: Path) -> Path:
    tiny("qwen2").save_pretrained(folder / "float")
    return folder / "float"


_MAKERS: dict[str, Callable[[Path], Path]] = {
    "saved": _saved,
    "experts": _experts,
    "gptq": _gptq,
    "awq": _awq,
    "awq_gemv": lambda folder: _awq(folder, "gemv"),
    "compressed_tensors": _compressed,
    "torchao": _torchao,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
    "floats": _floats,
}


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="armllm-fuzz-")


@cache
def valid(kind: str) -> Path:
    """Returns a valid checkpoint of a kind: a folder, or a GGUF file; it is removed when the process ends."""
    folder = Path(_root().name) / kind
    folder.mkdir()
    return _MAKERS[kind](folder)


def scratch() -> Path:
    """Returns a folder for mutants."""
    return Path(_root().name) / "mutant"
