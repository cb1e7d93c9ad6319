"""Comparison of patched tiny models with their unpatched originals."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

import torch_armllm
from tests.support.patched_models import chunked
from tests.support.reference_modules import emulate
from torch_armllm import Recipe
from torch_armllm.hf.base_model import first_position_of
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.report import Report

CAPTURED = [
    "llama", "llama4_text", "mistral", "mixtral", "ministral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "olmo2", "olmoe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "phimoe", "gpt_oss",
    "granite", "granitemoe", "granitemoeshared", "deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "cohere",
    "cohere2", "starcoder2", "stablelm", "gpt2", "gpt_neox", "opt", "falcon", "smollm3", "ernie4_5_moe",
    "exaone4", "hunyuan_v1_moe", "dots1", "minimax_m2", "nemotron", "gemma4", "gemma4_text", "mimo_v2_flash",
    "deepseek_v32", "glm_moe_dsa", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear",
    "olmo_hybrid", "lfm2", "lfm2_moe", "lfm3", "bailing_hybrid", "granitemoehybrid", "nemotron_h",
    "falcon_h1", "bamba", "zamba2", "mamba2", "mamba", "falcon_mamba", "jamba", "minimax",
    "recurrent_gemma", "hy_v4", "inkling_text",
]  # fmt: skip
"""Families that must run as a graph of fused ops."""


class Bounds(NamedTuple):
    """Bounds of differences between a quantized model's logits and its emulation's, relative to the max."""

    usual: float = 1e-3
    """90th percentile of the differences"""
    worst: float = 0.1
    """largest difference: an activation may round differently, and a token may go to another expert"""


_EARLY_ROUNDING = Bounds(usual=1e-2)
"""One activation rounds differently early in the sequence, and all later tokens attend to it.  With weights
from other seeds, these families differ by 1e-7."""
_ABSORBED = Bounds(usual=3e-2)
"""Absorbed latent attention rounds queries and attention outputs; the emulation rounds latents."""

BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("cohere_compass_text", "gemma4_unified", "granite", "phi"), _EARLY_ROUNDING),
    **dict.fromkeys(("axk2", "deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu"), _ABSORBED),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _ABSORBED),
    # Some tokens are routed to other experts; the experts of axk1 differ much.
    "deepseek_v3": _ABSORBED._replace(worst=0.3),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), _ABSORBED._replace(worst=0.6)),
    "axk1": _ABSORBED._replace(worst=1.0),
}
"""Bounds of the families that differ from the default."""

IDS = tiny_ids(1, 41)  # longer than the sliding windows
ROWS = tiny_ids(2, 20, seed=5)
PADDING = 7
"""Difference in length between the second and the first of `ROWS`."""


@torch.no_grad()
def expected(model: Any) -> list[Tensor]:
    """Returns the logits of `IDS` and of each of `ROWS` alone, by a model's own forward."""
    return [model(input_ids=ids).logits for ids in (IDS, ROWS[:1, PADDING:], ROWS[1:])]


@torch.no_grad()
def steps(model: Any) -> dict[str, Tensor]:
    """Returns a patched model's logits: in one step, in chunks, token by token, and batched with padding.

    Calls that run module by module are errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")
        return _steps(model)


def _steps(model: Any) -> dict[str, Tensor]:
    mask = torch.ones_like(ROWS)
    mask[0, :PADDING] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + first_position_of(model.base_model)
    together = model(input_ids=ROWS, attention_mask=mask, position_ids=positions).logits
    whole = model(input_ids=IDS)
    rows = {"prefill": whole.logits, "shorter row": together[:1, PADDING:], "longer row": together[1:]}
    if not hasattr(whole, "past_key_values"):  # the family has no cache: `generate` computes all tokens again
        return rows
    return {
        **rows,
        "chunks": chunked(model, IDS, [17, 9, 15], DynamicCache(config=model.config)),  # as `generate` does
        "decode": chunked(model, IDS, [36, 1, 1, 1, 1, 1]),
    }


@torch.no_grad()
def own_forward_differences(model: Any, twin: Any) -> dict[str, tuple[float, float]]:
    """Returns differences between two models' own forwards: a prompt and two decode steps."""
    actual, expected_logits = (m(input_ids=IDS).logits for m in (model, twin))
    result = differences({"prefill": actual}, [expected_logits] * 3)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    try:
        expected_steps = twin.generate(IDS, output_logits=True, **options).logits
    except Exception:  # noqa: BLE001 - some tiny models cannot generate
        return result
    actual_logits = model.generate(IDS, output_logits=True, **options).logits
    return {**result, **differences({"first token": actual_logits[0]}, [expected_steps[0]] * 3)}


def differences(actual: dict[str, Tensor], expected_logits: list[Tensor]) -> dict[str, tuple[float, float]]:
    """Returns each run's 90th percentile and largest difference, relative to the largest logit."""
    whole, shorter, longer = expected_logits
    result = {}
    for name, logits in actual.items():
        other = {"shorter row": shorter, "longer row": longer}.get(name, whole)
        difference = (logits.float() - other.float()).abs().flatten() / other.float().abs().max()
        result[name] = (float(difference.quantile(0.9)), float(difference.max()))
    return result


def check_unquantized(family: str) -> None:
    """Asserts that a family is captured, and that its patched float model equals the original."""
    model = tiny_model(family)
    expected_logits = expected(model)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    for name, (_, largest) in differences(steps(model), expected_logits).items():
        assert largest < 3e-4, name


def check_quantized(family: str) -> Report:
    """Asserts that a family's quantized model matches its emulation; returns its report."""
    model = tiny_model(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize(model, Recipe(importance=False), progress=False)
        twin = emulate(model)
        report = torch_armllm.patch(model, progress=False)
    if report.captured:
        result = differences(steps(model), expected(twin))
    else:
        assert family not in CAPTURED, report.capture_reason
        result = own_forward_differences(model, twin)
    bounds = BOUNDS.get(family, Bounds())
    for name, (usual, worst) in result.items():
        assert usual < bounds.usual, name
        assert worst < bounds.worst, name
    return report
