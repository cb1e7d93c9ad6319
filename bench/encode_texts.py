"""Texts that a model reads in a second: transformers, patched, and ONNX Runtime where it is installed.

    python -m bench.encode_texts [--shape minilm|bge|modernbert|qwen3-embedding] [--texts 32] [--rounds 5]
                                 [--quantization auto]

Models have random weights and the shapes of all-MiniLM-L6, bge-base, ModernBERT-base and
Qwen3-Embedding-0.6B. Texts have 20 to 250 (of the last, 200) random tokens and are padded as a tokenizer pads
a batch. Rounds alternate between the models. ONNX Runtime runs the float32 encoder exported by torch, its
layers quantized dynamically to INT8; without the packages onnx, onnxscript and onnxruntime it is left out.
Rows have medians, and the least cosine of a text's vector to that of the first model; random weights make
more of rounding than trained ones.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, ModernBertConfig, Qwen3Config

import torch_armllm
from bench.case import Row, in_rounds, run
from bench.engine_steps import timed

SHORTEST, VOCABULARY = 20, 30522


@dataclass(frozen=True)
class Shape:
    """A model's shape.

    Attributes:
        config: makes its configuration.
        longest: tokens of a text, at most.
        dtypes: that transformers runs, the reference first.
        decodes: texts are padded on the left, and the last token's vector counts; else the mean of all.
    """

    config: Callable[[], Any]
    longest: int = 250
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    decodes: bool = False


def _bert(layers: int, hidden: int, intermediate: int) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=12,
        intermediate_size=intermediate,
    )


def _qwen3() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=32000,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        use_cache=False,
    )


SHAPES = {
    "minilm": Shape(lambda: _bert(6, 384, 1536)),
    "bge": Shape(lambda: _bert(12, 768, 3072)),
    "modernbert": Shape(lambda: ModernBertConfig(vocab_size=50368)),
    "qwen3-embedding": Shape(_qwen3, 200, (torch.bfloat16,), decodes=True),
    "tiny": Shape(lambda: _bert(2, 96, 192), 40),
}


def random_texts(count: int, shape: Shape) -> dict[str, Tensor]:
    """Returns token ids and the attention mask of texts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(SHORTEST, shape.longest, (count,), generator=generator)
    places = torch.arange(int(lengths.max())).expand(count, -1)
    mask = (places.flip(-1) if shape.decodes else places) < lengths[:, None]
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


class _Hidden(nn.Module):
    """An encoder from two tensors to one, as the exporter takes it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def onnx_int8(model: Any, texts: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Returns a function that runs a model by ONNX Runtime, with layers in INT8.

    Raises:
        ImportError: a package is missing.
    """
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path, packed = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        sizes = {0: "texts", 1: "tokens"}
        torch.onnx.export(
            *(_Hidden(model).eval(), tuple(texts.values()), path),
            input_names=list(texts),
            output_names=["hidden"],
            dynamic_axes={name: sizes for name in (*texts, "hidden")},
            dynamo=False,
        )
        quantize_dynamic(path, packed)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(packed, options, providers=["CPUExecutionProvider"])
    inputs = {name: tensor.numpy() for name, tensor in texts.items()}
    return lambda: torch.from_numpy(session.run(["hidden"], inputs)[0])


def runs_of(shape: Shape, texts: dict[str, Tensor], schemes: list[str]) -> dict[str, Callable[[], Tensor]]:
    """Returns functions that compute the hidden states of texts, by the names of what runs them."""
    torch.manual_seed(0)
    original = AutoModel.from_config(shape.config(), dtype=shape.dtypes[0]).eval()
    models = {}
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        models[f"transformers, {name}"] = copy.deepcopy(original).to(dtype)
        for scheme in schemes:
            patched = copy.deepcopy(original).to(dtype)
            torch_armllm.patch(patched, scheme, progress=False)
            models[f"patched, {scheme}, {name}"] = patched

    def run_of(model: Any) -> Callable[[], Tensor]:
        return lambda: model(**texts).last_hidden_state

    runs = {name: run_of(model) for name, model in models.items()}
    try:
        if not shape.decodes:
            runs["ONNX Runtime, int8"] = onnx_int8(original, texts)
    except (ImportError, RuntimeError) as error:
        print(f"ONNX Runtime is left out: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return runs


@torch.no_grad()
def encode_texts(
    *,
    shape: Literal["minilm", "bge", "modernbert", "qwen3-embedding", "tiny"] = "minilm",
    texts: int = 32,
    rounds: int = 5,
    quantization: tuple[str, ...] = ("auto",),
) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    chosen = SHAPES[shape]
    read = random_texts(texts, chosen)
    runs = runs_of(chosen, read, quantization)
    mask, vectors = read["attention_mask"][..., None], {}
    for name, call in runs.items():
        hidden = call().float()
        vectors[name] = hidden[:, -1] if chosen.decodes else (hidden * mask).sum(1) / mask.sum(1)
    reference = next(iter(vectors.values()))
    seconds = in_rounds({name: lambda _, call=call: timed(call) for name, call in runs.items()}, rounds)
    for name, found in seconds.items():
        cosine = float(torch.cosine_similarity(vectors[name], reference).min())
        yield {"model": name, "texts_s": texts / median(found), "cosine": cosine}


if __name__ == "__main__":
    run(encode_texts)
