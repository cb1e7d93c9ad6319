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
from torch_armllm.evaluation.variant import Variant
from torch_armllm.hf.token_by_token import check_token_by_token
from torch_armllm.model_survey.tiny_models import tiny_config

diffusion = pytest.importorskip(
    "transformers.models.diffusion_gemma.modeling_diffusion_gemma", reason="an older release of transformers"
)

_WAYS: dict[str, Callable[[str], Any]] = {
    "load": load,
    "load_model": load_model,
    "LLM": LLM,
    "quantize": lambda folder: FloatCheckpoint(Path(folder)).empty_model(),
    "eval": lambda folder: load_variant(folder, Variant.parse("int4")),
}


def _config() -> Any:
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    return tiny_config("diffusion_gemma", text_config=sizes, canvas_length=8)


def test_patch_refuses_block_diffusion() -> None:
    with torch.device("meta"):
        model = diffusion.DiffusionGemmaForBlockDiffusion(_config()).eval()
    with pytest.raises(ValueError, match="DiffusionGemmaForBlockDiffusion.*refines whole blocks of tokens"):
        patch(model, progress=False)


@pytest.mark.parametrize("way", _WAYS)
def test_folders_of_block_diffusion_are_refused(way: str, tmp_path: Path) -> None:
    config = _config()
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*refines whole blocks of tokens"):
        _WAYS[way](str(tmp_path))


def test_models_that_draft_for_another_are_refused() -> None:
    assistant = pytest.importorskip("transformers.models.gemma4_assistant.modeling_gemma4_assistant")
    with pytest.raises(ValueError, match="a draft .*drafts for another model"):
        check_token_by_token("a draft", assistant.Gemma4AssistantForCausalLM)
