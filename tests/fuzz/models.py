"""Random configurations of model families: patched models against their unpatched twins.

    python -m tests.fuzz.models --seeds 1000          the seeds 0 … 999
    python -m tests.fuzz.models --family afmoe --seeds 50 --first 7

A seed draws a family, sizes, biases, gates, norms, windows shorter than the prompt, rope types and whether
the embeddings are tied, and compares logits of a prompt, of chunks after it, of decode steps and of a batch
with left padding.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch_armllm
from tests.support.parity import differences, expected, steps
from torch_armllm.model_survey.tiny_models import tiny_config, tiny_model

TOLERANCE = 5e-4
"""Largest difference of float32 logits, relative to the largest logit."""
_SIZES = {
    "hidden_size": (32, 64, 96, 128),
    "n_embd": (32, 64, 96),
    "intermediate_size": (48, 80, 96, 160),
    "moe_intermediate_size": (32, 48, 80),
    "num_hidden_layers": (2, 3),
    "n_layer": (2, 3),
    "n_layers": (2, 3),
    "n_head": (2, 4, 6, 8),
    "n_heads": (2, 4, 6, 8),
    "num_heads": (2, 4, 6, 8),
    "d_model": (32, 64, 96),
    "head_dim": (8, 16, 32),
    "num_experts": (4, 8, 16),
    "num_local_experts": (4, 8, 16),
    "n_routed_experts": (4, 8, 16),
    "num_experts_per_tok": (1, 2, 3),
    "n_group": (1, 2),
    "routed_scaling_factor": (1.0, 2.5),
    "sliding_window": (3, 7, 16),
    "window_size": (3, 7, 16),
    "rotary_dim": (4, 8),
    "attention_chunk_size": (16, 64),
    "rms_norm_eps": (1e-6, 1e-5, 1e-3),
    "layer_norm_epsilon": (1e-5, 1e-3),
    "layer_norm_eps": (1e-5, 1e-3),
    "final_logit_softcapping": (None, 5.0),
    "attn_logit_softcapping": (None, 5.0),
    "logit_scale": (0.0625, 1.0),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "n_shared_experts": (1, 2),
    "kv_lora_rank": (16, 32),
    "q_lora_rank": (None, 32),
    "expand": (1, 2),
    "conv_kernel": (2, 3, 4),
    "mamba_d_conv": (2, 3, 4),
    "state_size": (4, 16, 20),
    "mamba_d_state": (4, 16, 20),
    "time_step_rank": (4, 8),
    "mamba_dt_rank": (4, 8),
    "n_groups": (1, 2, 4),
    "conv1d_width": (2, 3, 4),
    "lru_width": (32, 64, 96),
    "block_size": (3, 16, 64),
    "sliding_window_size": (3, 7, 16),
    "rel_extent": (2, 9, 70),
    "d_rel": (1, 4, 16),
    "log_scaling_n_floor": (None, 4),
    "conv_kernel_size": (2, 3, 4),
}
_SWITCHES = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "norm_topk_prob", "clip_qkv",
    "use_qk_norm", "qk_layernorm", "alibi", "parallel_attn", "new_decoder_architecture", "multi_query",
    "bias", "use_parallel_residual", "rope_interleave", "scale_attn_by_inverse_layer_idx", "mup_enabled",
    "use_sliding_window", "do_layer_norm_before", "use_conv_bias", "mamba_conv_bias", "mamba_proj_bias",
    "residual_in_fp32",
)  # fmt: skip
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@cache
def captured_families() -> list[str]:
    """Returns the families that the page of models lists as plans or graphs."""
    rows = [line.split("|") for line in _PAGE.read_text().splitlines() if line.startswith("| `")]
    return [row[1].strip(" `") for row in rows if row[2].strip() in ("plan", "graph")]


@dataclass(frozen=True)
class Case:
    """A seed's family and configuration values."""

    seed: int
    family: str
    overrides: dict[str, Any]

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.overrides.items())
        return f"seed {self.seed}: {self.family}({values})"


def draw(seed: int, family: str | None = None) -> Case:
    """Returns the case of a seed."""
    source = random.Random(seed)
    family = family or source.choice(captured_families())
    config = tiny_config(family)
    fields = vars(config).keys()
    overrides: dict[str, Any] = {}
    for name, values in _SIZES.items():
        if name in fields and source.random() < 0.5:
            overrides[name] = source.choice(values)
    for name in _SWITCHES:
        if isinstance(getattr(config, name, None), bool) and source.random() < 0.4:
            overrides[name] = source.random() < 0.5
    if "num_attention_heads" in fields and source.random() < 0.6:
        heads = source.choice((2, 4, 6, 8))
        overrides["num_attention_heads"] = heads
        if "num_key_value_heads" in fields:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            overrides["num_key_value_heads"] = heads if "kv_lora_rank" in fields else source.choice(divisors)
    overrides.update(_inner_sizes(config, overrides))
    ropes = getattr(config, "rope_parameters", None)
    if isinstance(ropes, dict) and "rope_theta" in ropes and source.random() < 0.5:
        theta = source.choice((1e3, 1e4, 1e6))
        overrides["rope_parameters"] = {**ropes, **source.choice(_ROPES), "rope_theta": theta}
    return Case(seed, family, overrides)


def _inner_sizes(config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes that follow from a Mamba's hidden size and its expansion."""
    if not hasattr(config, "state_size") or not hasattr(config, "expand"):
        return {}
    size = int(overrides.get("hidden_size", config.hidden_size) * overrides.get("expand", config.expand))
    if not hasattr(config, "num_heads"):
        return {"intermediate_size": size}
    return {"num_heads": size // overrides.get("head_dim", config.head_dim)}


class Unfit(Exception):
    """The configuration is refused by transformers, or its model does not run."""


def run(case: Case) -> str:
    """Compares a case's patched model with its unpatched twin.

    Returns:
        ``plan``, ``graph`` or ``modules``: how the patched model runs.

    Raises:
        Unfit: the unpatched model does not run.
        AssertionError: the patched model differs, or its self-check left something out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(case.family, seed=case.seed, **case.overrides)
            wanted = expected(model)
        except Exception as error:
            raise Unfit(f"{type(error).__name__}: {error}") from error
        if not all(bool(logits.isfinite().all()) for logits in wanted):
            raise Unfit("its own logits are not finite")
        report = torch_armllm.patch(model, None, progress=False)
    if not report.captured:
        assert "other hidden states" not in str(report.capture_reason), report.capture_reason
        assert "rewrite failed" not in str(report.capture_reason), report.capture_reason
        return "modules"
    suspicious = [note for note in report.notes if "report this as a bug" in note]
    assert not suspicious, suspicious
    try:
        logits = steps(model)
    except UserWarning as warning:
        if "the plan supports at most" in str(warning):
            return "modules"  # its chunks of attention are shorter than the prompt
        raise
    for name, (_, largest) in differences(logits, wanted).items():
        assert largest < TOLERANCE, f"{name}: logits differ by {largest:.2g}"
    by_nodes = any("node by node" in note for note in report.notes)
    return "graph" if by_nodes else "plan"


def main(arguments: list[str]) -> int:
    """Runs the seeds, prints findings and counts; returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds (100)")
    parser.add_argument("--first", type=int, default=0, help="first seed (0)")
    parser.add_argument("--family", help="a model type; default: drawn")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        case = None
        try:
            case = draw(seed, options.family)
            counts[run(case)] += 1
        except Unfit:
            counts["unfit"] += 1
        except Exception as error:  # noqa: BLE001 - a finding
            counts["finding"] += 1
            print(
                f"FINDING {case or seed}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True
            )
    print(dict(counts), f"{time.monotonic() - began:.0f} s")
    return 1 if counts["finding"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
