"""Tests of the detection of token mixing outside of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import tiny
from torch_armllm.capture.export import capture
from torch_armllm.capture.token_mixing import mixes_tokens
from torch_armllm.hf.model_kind import kind_of


class Body(nn.Module):
    """Embeddings, a rotation-like use of positions, and a given layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(50, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        if self.kind == "shifted":
            x = x + torch.roll(x, 1, 1)
        elif self.kind == "averaged":
            x = x + x.mean(1, keepdim=True)
        elif self.kind == "counted":
            x = x + torch.arange(x.shape[1])[None, :, None] * 0.1
        return x * torch.cos(position_ids[..., None] * 0.1)


@pytest.mark.parametrize("kind", ["tokenwise", "shifted", "averaged", "counted"])
def test_token_mixing_is_detected(kind: str) -> None:
    torch.manual_seed(0)
    graph = torch.fx.symbolic_trace(Body(kind))
    assert mixes_tokens(graph, 50) == (kind != "tokenwise")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_models_mix_tokens_in_attention_only(family: str, dtype: torch.dtype) -> None:
    graph = capture(kind_of(tiny(family, dtype))).graph_module
    assert not mixes_tokens(graph, 97)
