"""Tiny models that pool, and their folders, with a byte-level tokenizer and sentence-transformers' files."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import torch_armllm
from tests.support.tiny_server import tokenizer
from torch_armllm.model_survey.tiny_models import tiny_config

CLASSES: dict[str, Any] = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "tag": AutoModelForTokenClassification,
    "generate": AutoModelForCausalLM,
}
TEXTS = ["a query", "b", "a document that is somewhat longer than the others", "one more text", "x y z"]


@functools.cache
def pooling_model(task: str, labels: int = 3) -> Any:
    """Returns a float32 model of a task; the same one for all tests."""
    return _model(task, labels)


@functools.cache
def patched_model(task: str, labels: int = 3) -> Any:
    """Returns a copy of that model, patched without quantization: a capture takes a second."""
    model = copy.deepcopy(pooling_model(task, labels))
    torch_armllm.patch(model, None, progress=False)
    return model


def pooling_folder(folder: Path, task: str, labels: int = 3, **overrides: Any) -> Path:
    """Saves a float32 model of a task, and its tokenizer."""
    _model(task, labels, **overrides).save_pretrained(folder)
    own = tokenizer()
    own.chat_template = None  # by which sentence-transformers would read texts as messages
    own.save_pretrained(folder)
    return folder


def _model(task: str, labels: int, **overrides: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "max_position_embeddings": 128}
    config = tiny_config("qwen3", vocab_size=259, **sizes | overrides)
    config.num_labels, config.pad_token_id = labels, 0
    model = CLASSES[task].from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def with_modules(folder: Path, after: dict[str, Any], **files: Any) -> Path:
    """Writes ``modules.json``, the configuration of each module after the model, and further JSON files."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(after.items(), 1):
        path = f"{index}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
        listed.append(
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
