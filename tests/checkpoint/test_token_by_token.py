"""Models that generate in another way than token by token are refused by name at every way in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_armllm import LLM, load, patch
from torch_armllm.checkpoint.float_checkpoint import FloatCheckpoint
from torch_armllm.checkpoint.load import load_model
from torch_armllm.evaluation.loading import load_variant
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config, tiny_model

diffusion = pytest.importorskip(
    "transformers.models.diffusion_gemma.modeling_diffusion_gemma", reason="another release of transformers"
)


class _Any:
    """Makes models of a configuration by a class of its own."""

    from_config = diffusion.DiffusionGemmaForBlockDiffusion._from_config


def _config() -> Any:
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    return tiny_config("diffusion_gemma", text_config=sizes, canvas_length=8)


def test_patch_refuses_block_diffusion() -> None:
    model = build_tiny(_Any, _config())
    with pytest.raises(ValueError, match="DiffusionGemmaForBlockDiffusion.*refines whole blocks of tokens"):
        patch(model, progress=False)
