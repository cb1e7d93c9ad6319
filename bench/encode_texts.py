"""Texts that an encoder reads in a second: transformers, patched, and ONNX Runtime where it is installed.

    python -m bench.encode_texts [--shape minilm|bge|modernbert] [--texts 32] [--rounds 5]
                                 [--quantization auto]

Models have random weights and the shapes of all-MiniLM-L6, bge-base and ModernBERT-base. Texts have 20 to 250
random tokens and are padded on the right, as a tokenizer pads a batch. Rounds alternate between the models.
ONNX Runtime runs the float32 model exported by torch, its layers quantized dynamically to INT8; without the
packages onnx, onnxscript and onnxruntime it is left out. Prints medians, and the least cosine of a text's
mean vector to that of the float32 model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, ModernBertConfig

import torch_armllm

LONGEST, SHORTEST, VOCABULARY = 250, 20, 30522
_SHAPES: dict[str, Callable[[], Any]] = {
    "minilm": lambda: _bert(6, 384, 1536),
    "bge": lambda: _bert(12, 768, 3072),
    "modernbert": lambda: ModernBertConfig(vocab_size=50368),
}


def _bert(layers: int, hidden: int, intermediate: int) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=12,
        intermediate_size=intermediate,
    )


def random_texts(count: int) -> dict[str, Tensor]:
    """Returns token ids and the attention mask of texts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(SHORTEST, LONGEST, (count,), generator=generator)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return {
        "input_ids": mask * torch.randint(1, VOCABULARY, mask.shape, generator=generator),
        "attention_mask": mask,
    }


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


def runs_of(shape: str, texts: dict[str, Tensor], schemes: list[str]) -> dict[str, Callable[[], Tensor]]:
    """Returns functions that compute the hidden states of texts, by the names of what runs them."""
    torch.manual_seed(0)
    original = AutoModel.from_config(_SHAPES[shape](), dtype=torch.float32).eval()
    models = {
        "transformers, float32": original,
        "transformers, bfloat16": copy.deepcopy(original).to(torch.bfloat16),
    }
    for scheme in schemes:
        for dtype in (torch.float32, torch.bfloat16):
            patched = copy.deepcopy(original).to(dtype)
            torch_armllm.patch(patched, scheme, progress=False)
            models[f"patched, {scheme}, {str(dtype).removeprefix('torch.')}"] = patched

    def run_of(model: Any) -> Callable[[], Tensor]:
        return lambda: model(**texts).last_hidden_state

    runs = {name: run_of(model) for name, model in models.items()}
    try:
        runs["ONNX Runtime, int8"] = onnx_int8(original, texts)
    except (ImportError, RuntimeError) as error:
        print(f"ONNX Runtime is left out: {type(error).__name__}: {str(error)[:200]}")
    return runs


@torch.no_grad()
def main() -> None:
    """Measures and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="minilm", choices=_SHAPES)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="auto", help="schemes of the patched copies")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    texts = random_texts(options.texts)
    runs = runs_of(options.shape, texts, options.quantization.split(","))
    rates: dict[str, list[float]] = {name: [] for name in runs}
    vectors: dict[str, Tensor] = {}
    mask = texts["attention_mask"][..., None]
    for number in range(options.rounds + 1):  # the first round warms up
        for name, run in runs.items():
            begin = time.perf_counter()
            hidden = run()
            if number:
                rates[name].append(options.texts / (time.perf_counter() - begin))
            vectors[name] = (hidden.float() * mask).sum(1) / mask.sum(1)
    own = vectors["transformers, float32"]
    for name, found in rates.items():
        cosine = float(torch.cosine_similarity(vectors[name], own).min())
        print(f"{name:26} {statistics.median(found):8.2f} texts/s, cosine {cosine:.4f}")


if __name__ == "__main__":
    main()
