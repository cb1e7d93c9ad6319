"""How a patched tiny model of any family is compared with the model that was patched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.patched_models import chunked
from torch_armllm.coverage.tiny import tiny_ids
from torch_armllm.hf.body import first_position_of

CAPTURED = [
    "llama", "llama4_text", "mistral", "mixtral", "ministral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "olmo2", "olmoe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "phimoe", "gpt_oss",
    "granite", "granitemoe", "granitemoeshared", "deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "cohere",
    "cohere2", "starcoder2", "stablelm", "gpt2", "gpt_neox", "opt", "falcon", "smollm3", "ernie4_5_moe",
    "exaone4", "hunyuan_v1_moe", "dots1", "minimax_m2", "nemotron",
]  # fmt: skip
"""Families that must run as a graph of fused ops, whatever else happens."""

IDS = tiny_ids(1, 41)  # longer than the sliding windows
ROWS = tiny_ids(2, 20, seed=5)
PADDING = 7
"""Tokens that the first of `ROWS` has fewer than the second."""


@torch.no_grad()
def expected(model: Any) -> list[Tensor]:
    """Logits of `IDS`, and of each of `ROWS` alone, by a model's own forward."""
    return [model(input_ids=ids).logits for ids in (IDS, ROWS[:1, PADDING:], ROWS[1:])]


@torch.no_grad()
def steps(model: Any) -> dict[str, Tensor]:
    """The same by a patched model, in one step, in chunks, token by token, and batched with padding."""
    mask = torch.ones_like(ROWS)
    mask[0, :PADDING] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + first_position_of(model.base_model)
    together = model(input_ids=ROWS, attention_mask=mask, position_ids=positions).logits
    return {
        "prefill": model(input_ids=IDS).logits,
        "chunks": chunked(model, IDS, [17, 9, 15]),
        "decode": chunked(model, IDS, [36, 1, 1, 1, 1, 1]),
        "shorter row": together[:1, PADDING:],
        "longer row": together[1:],
    }


@torch.no_grad()
def apart_in_own_forward(model: Any, twin: Any) -> dict[str, tuple[float, float]]:
    """Differences between two models that run by their own forward: a text, and two steps of generation."""
    got, wanted = (m(input_ids=IDS).logits for m in (model, twin))
    found = differences({"prefill": got}, [wanted] * 3)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    try:
        own = twin.generate(IDS, output_logits=True, **options).logits
    except Exception:  # noqa: BLE001 - a tiny model that never could generate
        return found
    ours = model.generate(IDS, output_logits=True, **options).logits
    return {**found, **differences({"first token": ours[0]}, [own[0]] * 3)}


def differences(got: dict[str, Tensor], wanted: list[Tensor]) -> dict[str, tuple[float, float]]:
    """Of each way to run, the 90th percentile and the largest difference relative to the largest logit."""
    whole, shorter, longer = wanted
    found = {}
    for name, logits in got.items():
        other = {"shorter row": shorter, "longer row": longer}.get(name, whole)
        apart = (logits.float() - other.float()).abs().flatten() / other.float().abs().max()
        found[name] = (float(apart.quantile(0.9)), float(apart.max()))
    return found
