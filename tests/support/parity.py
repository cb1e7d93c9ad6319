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
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching.lm_head import LMHead
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.step import StepInputs
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
    "recurrent_gemma", "hy_v4", "inkling_text", "hrm_text", "big_bird", "zamba",
    "inkling2_text",
]  # fmt: skip
"""Families that must run as a graph of fused ops."""


COUNT_PADDING = ("mvp", "trocr")
"""Families whose forward drops positions: with padding on the left, they number tokens by their columns."""


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
    **dict.fromkeys(("axk2", "deepseek_v2", "kimi_linear", "longcat_flash", "minicpm3", "youtu"), _ABSORBED),
    # Some tokens are routed to other experts; the experts of axk1 differ much.
    **dict.fromkeys(("bailing_hybrid", "deepseek_v3", "glm4_moe_lite"), _ABSORBED._replace(worst=0.6)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), _ABSORBED._replace(worst=0.6)),
    "axk1": _ABSORBED._replace(worst=1.0),
}
"""Bounds of the families that differ from the default."""

PADDING = 7
"""Difference in length between the two rows of `Texts`."""
_MIXED = ((17, 12, 0), (9, 1, 19), (15, 0, 1))
"""New tokens of each text in steps that compute several: prompts; a chunk, a decode step and a prompt; …"""


class Texts(NamedTuple):
    """Token ids on which models are compared.

    Attributes:
        ids: int64 ``(1, 41)``, longer than the sliding windows.
        rows: int64 ``(2, 20)``; the first one's first `PADDING` tokens are padding.
    """

    ids: Tensor
    rows: Tensor

    @classmethod
    def random(cls, seed: int) -> Texts:
        """Returns the texts of a seed."""
        return cls(tiny_ids(1, 41, seed=2 * seed + 1), tiny_ids(2, 20, seed=2 * seed + 5))

    @property
    def each(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each text alone, ``(1, T)``."""
        return self.ids, self.rows[:1, PADDING:], self.rows[1:]


TEXTS = Texts.random(0)
IDS = TEXTS.ids


@torch.no_grad()
def expected(model: Any, texts: Texts = TEXTS) -> list[Tensor]:
    """Returns the logits of each text alone, by a model's own forward."""
    return [model(input_ids=ids).logits for ids in texts.each]


@torch.no_grad()
def steps(model: Any, texts: Texts = TEXTS) -> dict[str, Tensor]:
    """Returns a patched model's logits, by the name of how they are computed.

    Texts are computed in one step, in chunks, token by token, batched with padding, and several in one step
    as an engine does.  Calls that run module by module are errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")
        return {**_steps(model, *texts), **_mixed(model, texts)}


def _mixed(model: Any, texts: Texts) -> dict[str, Tensor]:
    """Returns the logits of texts that a plan computes together: chunks, decode steps and prompts."""
    forward = patched_forward(model)
    assert forward is not None
    pool, head = BlockPool(forward.shape, blocks=4), LMHead(model, forward)
    sequences = [SequenceBlocks(pool) for _ in texts.each]
    found: list[list[Tensor]] = [[] for _ in texts.each]
    for counts in _MIXED:
        taking = [number for number, count in enumerate(counts) if count]
        sizes = [counts[number] for number in taking]
        begins = [sequences[number].length for number in taking]
        spans = [
            (number, begin, begin + size) for number, begin, size in zip(taking, begins, sizes, strict=True)
        ]
        ids = torch.cat([texts.each[number][:, begin:end] for number, begin, end in spans], 1)
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in spans])[None]
        positions = positions + forward.first_position
        inputs = StepInputs.pack(pool, [sequences[number] for number in taking], sizes, ids, positions)
        logits = head(forward.plan.run(inputs)).clone()
        for number, rows in zip(taking, logits.split(sizes), strict=True):
            found[number].append(rows)
    names = ("mixed", "mixed shorter row", "mixed longer row")
    return {name: torch.cat(rows)[None] for name, rows in zip(names, found, strict=True)}


def _steps(model: Any, ids: Tensor, rows: Tensor) -> dict[str, Tensor]:
    mask = torch.ones_like(rows)
    mask[0, :PADDING] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + first_position_of(model.base_model)
    together = model(input_ids=rows, attention_mask=mask, position_ids=positions).logits
    whole = model(input_ids=ids)
    found = {"prefill": whole.logits, "longer row": together[1:]}
    if model.config.model_type not in COUNT_PADDING:
        found["shorter row"] = together[:1, PADDING:]
    if not hasattr(whole, "past_key_values"):  # the family has no cache: `generate` computes all tokens again
        return found
    return {
        **found,
        "chunks": chunked(model, ids, [17, 9, 15], DynamicCache(config=model.config)),  # as `generate` does
        "decode": chunked(model, ids, [36, 1, 1, 1, 1, 1]),
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
    result = {}
    for name, difference in _relative(actual, expected_logits).items():
        result[name] = (float(difference.flatten().quantile(0.9)), float(difference.max()))
    return result


def token_differences(actual: dict[str, Tensor], expected_logits: list[Tensor]) -> dict[str, Tensor]:
    """Returns the largest difference of each run's tokens, ``(T,)``, relative to the largest logit."""
    return {name: found[0].amax(-1) for name, found in _relative(actual, expected_logits).items()}


def _relative(actual: dict[str, Tensor], expected_logits: list[Tensor]) -> dict[str, Tensor]:
    whole, shorter, longer = expected_logits
    result = {}
    for name, logits in actual.items():
        other = shorter if name.endswith("shorter row") else longer if name.endswith("longer row") else whole
        result[name] = (logits.float() - other.float()).abs() / other.float().abs().max()
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
