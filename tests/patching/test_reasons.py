"""The report's reasons name the layer that keeps a model from a plan, and what it does."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import torch_armllm
from torch_armllm import Recipe
from torch_armllm.capture.markers.indexer import dense_limit, unknown_selection
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.plan.missing_operators import describe_missing

pytestmark = pytest.mark.filterwarnings("ignore")


def test_reason_of_a_model_that_is_not_captured() -> None:
    report = torch_armllm.patch(tiny_model("zaya"), Recipe(importance=False), progress=False)
    reason = "conv_qk_grouped (Conv1d) mixes tokens and channels, which no fused op does: causal_conv"
    assert not report.captured and reason in str(report.capture_reason)


def test_note_names_every_kind_of_layer_without_instructions() -> None:
    report = torch_armllm.patch(tiny_model("jetmoe"), Recipe(importance=False), progress=False)
    (note,) = [note for note in report.notes if "node by node" in note]
    router = (
        "layers.0.self_attention.experts.router (JetMoeTopKGating) chooses or groups rows by their values"
    )
    assert f"node by node: {router} (topk, zeros, scatter, sort and 2 more); " in note
    assert "layers.0.mlp (JetMoeMoE) chooses" in note
    assert "JetMoeRotaryEmbedding" not in note  # its angles are a table, though no rotation reads them


def test_indexers_of_tokens_and_blocks_are_known() -> None:
    blocks = tiny_model("minimax_m3_vl_text").model
    assert unknown_selection(blocks) is None
    found = "layers.1.self_attn.indexer (MiniMaxM3VLIndexer) selects 16 blocks of 128 tokens for attention"
    assert dense_limit(blocks).startswith(found)
    tokens = tiny_model("deepseek_v32").model
    assert unknown_selection(tokens) is None
    assert "(DeepseekV32Indexer) selects 64 tokens for attention" in dense_limit(tokens)
    assert unknown_selection(nn.Linear(2, 2)) is None


def test_operators_are_named_by_kind_of_layer_and_the_most_first() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for path, kind, target in (
        ("base.layers.0.norm", "models.Norm", torch.ops.aten.linalg_vector_norm.default),
        ("base.layers.0.mlp", "models.Mlp", torch.ops.aten.erfinv.default),
        ("base.layers.0.mlp", "models.Mlp", torch.ops.aten.add.Tensor),
        ("base.layers.1.mlp", "models.Mlp", torch.ops.aten.erfc.default),
    ):
        graph.call_function(target, (x,)).meta["nn_module_stack"] = {"": (path, kind)}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert describe_missing(nodes, {torch.ops.aten.add.Tensor}) == (
        "layers.0.mlp (Mlp) computes erfinv, erfc; layers.0.norm (Norm) normalizes in a way of its own"
        " (linalg_vector_norm): plans have no instruction for these operators"
    )
