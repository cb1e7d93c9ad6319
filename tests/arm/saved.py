"""A quantized checkpoint written on another processor, with the logits computed there.

python tests/arm/saved.py DIR     writes both, on whatever processor this is
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_armllm
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe

FAMILIES = ["llama", "mixtral"]


@torch.no_grad()
def answers(model: Any) -> dict[str, Tensor]:
    """Returns logits of a prompt and of two more steps, in float32, whose bits agree between processors."""
    out = model(token_ids(1, 21), use_cache=True)
    found = {"prompt": out.logits}
    for step in range(2):
        out = model(token_ids(1, 1, seed=step), past_key_values=out.past_key_values)
        found[f"step{step}"] = out.logits
    return {name: logits.contiguous() for name, logits in found.items()}


def save(folder: Path) -> None:
    """Writes the checkpoints and the logits."""
    for family in FAMILIES:
        model = tiny(family)
        report = torch_armllm.patch(model, Recipe(importance=False), progress=False)
        assert report.captured
        model.save_pretrained(folder / family)
        save_file(answers(model), folder / f"{family}.answers")


def expected(folder: Path, family: str) -> dict[str, Tensor]:
    """Returns the saved logits."""
    return load_file(folder / f"{family}.answers")


if __name__ == "__main__":
    save(Path(sys.argv[1]))
