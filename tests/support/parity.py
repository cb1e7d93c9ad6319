"""Comparison of patched tiny models with their unpatched originals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

import torch_armllm
from tests.support.patched_models import chunked
from tests.support.plan_steps import plan_steps
from tests.support.reference_modules import emulate
from torch_armllm import Recipe
from torch_armllm.hf.base_model import first_position_of
from torch_armllm.hf.cache_names import cache_field
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
    "inkling2_text", "dots3_note_text", "doge", "bart", "mvp", "pegasus", "trocr",
]  # fmt: skip
"""Families that must run as a graph of fused ops."""


COUNT_PADDING = ("mvp", "trocr")
"""Families whose forward drops positions: with padding on the left, they number tokens by their columns."""


TOLERANCE = 5e-4
"""Largest difference of float32 logits, relative to the largest logit."""
ABSORBED_TOLERANCE = 5e-2
"""The same for INT8 latents: the plan rounds queries and attention outputs, the modules round latents."""
_TEXTS = 64
"""Random texts of which a token's difference is the smallest."""

PADDING = 7
"""Difference in length between the two rows of `Texts`."""
_CHUNKS, _DECODE = [17, 9, 15], [36, 1, 1, 1, 1, 1]
"""New tokens of the calls of a loop that continues from the cache that the call before returned."""
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


Compare = Callable[[Any, Any, Texts], dict[str, Tensor]]
"""Compares a patched model and its twin on texts; returns differences ``(T,)`` by run."""
TEXTS = Texts.random(0)
IDS = TEXTS.ids


@torch.no_grad()
def expected(model: Any, texts: Texts = TEXTS) -> list[Tensor]:
    """Returns the logits of each text alone, by a model's own forward; of `COUNT_PADDING`, also of a row
    after padding."""
    alone = [model(input_ids=ids).logits for ids in texts.each]
    if model.config.model_type not in COUNT_PADDING:
        return alone
    return [*alone, model(**_padded(model, texts.rows)).logits[:1, PADDING:]]


@torch.no_grad()
def steps(model: Any, texts: Texts = TEXTS) -> dict[str, Tensor]:
    """Returns a patched model's logits, by the name of how they are computed.

    Texts are computed in one step, in chunks, token by token, batched with padding, and several in one step
    as an engine does.  Calls that run module by module are errors.
    """
    with warnings.catch_warnings(), plan_steps(model) as plan:
        warnings.filterwarnings("error", "torch_armllm: ")
        found = {**_steps(model, *texts), **_mixed(model, texts)}
    chunks = len(_CHUNKS) + len(_DECODE) if "chunks" in found else 0
    assert plan.count == 2 + chunks + len(_MIXED), "a call passed the plan by"
    return found


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
        positions = positions + forward.calls.first_position
        inputs = StepInputs.pack(pool, [sequences[number] for number in taking], sizes, ids, positions)
        logits = head(forward.plan.run(inputs)).clone()
        for number, rows in zip(taking, logits.split(sizes), strict=True):
            found[number].append(rows)
    names = ("mixed", "mixed shorter row", "mixed longer row")
    return {name: torch.cat(rows)[None] for name, rows in zip(names, found, strict=True)}


def _padded(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Returns the arguments of a call whose first row begins with padding."""
    mask = torch.ones_like(rows)
    mask[0, :PADDING] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + first_position_of(model.base_model)
    return {"input_ids": rows, "attention_mask": mask, "position_ids": positions}


def _steps(model: Any, ids: Tensor, rows: Tensor) -> dict[str, Tensor]:
    together = model(**_padded(model, rows)).logits
    whole = model(input_ids=ids)
    found = {"prefill": whole.logits, "longer row": together[1:]}
    counts = model.config.model_type in COUNT_PADDING
    found["padded row" if counts else "shorter row"] = together[:1, PADDING:]
    if cache_field(type(whole)) is None:  # the family has no cache: `generate` computes all tokens again
        return found
    return {
        **found,
        "chunks": chunked(model, ids, _CHUNKS, DynamicCache(config=model.config)),  # as `generate` does
        "decode": chunked(model, ids, _DECODE),
    }


@torch.no_grad()
def own_forward_differences(model: Any, twin: Any, texts: Texts) -> dict[str, Tensor]:
    """Returns differences between two models' own forwards, ``(T,)``: a prompt's, and those of `generate`."""
    ids = texts.ids
    actual, expected_logits = (m(input_ids=ids).logits for m in (model, twin))
    result = token_differences({"prefill": actual}, [expected_logits] * 3)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    try:
        expected_steps = twin.generate(ids, output_logits=True, **options).logits
    except Exception:  # noqa: BLE001 - some tiny models cannot generate
        return result
    first = model.generate(ids, output_logits=True, **options).logits[0]
    return {**result, **token_differences({"first token": first[None]}, [expected_steps[0][None]] * 3)}


def worst_differences(
    model: Any, twin: Any, tolerance: float, compare: Compare | None = None
) -> dict[str, float]:
    """Returns each run's largest difference between a patched model and its twin.

    Float32 rounding may move an activation to the next integer, or a token to another expert; that token and
    all after it differ then.  So a token's difference is the smallest over several random texts, as many as
    it takes to be within the tolerance: a wrong rewrite is wrong in all of them.

    Args:
        model: the patched model.
        twin: computes the same logits by its own forward.
        tolerance: stops at texts with all differences below it.
        compare: returns differences ``(T,)`` by run; default: those of `steps`.
    """
    smallest: dict[str, Tensor] = {}
    for number in range(_TEXTS):
        texts = Texts.random(number)
        if compare is None:
            found = token_differences(steps(model, texts), expected(twin, texts))
        else:
            found = compare(model, twin, texts)
        found = {name: row.nan_to_num(nan=float("inf")) for name, row in found.items()}
        smallest = {name: torch.minimum(row, smallest.get(name, row)) for name, row in found.items()}
        if all(float(row.max()) < tolerance for row in smallest.values()):
            break
    return {name: float(row.max()) for name, row in smallest.items()}


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
    whole, *rows = expected_logits
    others = dict(zip(("shorter row", "longer row", "padded row"), rows, strict=False))
    result = {}
    for name, logits in actual.items():
        other = next((others[row] for row in others if name.endswith(row)), whole)
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
    """Asserts that a family's quantized model matches its emulation; returns its report.

    A model with INT8 latents is checked with latents in floats too, which tells more: its logits differ less.
    """
    report = _check_quantized(family, Recipe(importance=False))
    if "int8_heads_linear" in report.ops:
        floats = _check_quantized(family, Recipe(importance=False, ignore=("*kv_b_proj",)))
        assert "int8_heads_linear" not in floats.ops
    return report


def _check_quantized(family: str, recipe: Recipe) -> Report:
    model = tiny_model(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize(model, recipe, progress=False)
        twin = emulate(model)
        report = torch_armllm.patch(model, progress=False)
    assert report.captured or family not in CAPTURED, report.capture_reason
    tolerance = ABSORBED_TOLERANCE if "int8_heads_linear" in report.ops else TOLERANCE
    compare = None if report.captured else own_forward_differences
    for name, largest in worst_differences(model, twin, tolerance, compare).items():
        assert largest < tolerance, name
    return report
