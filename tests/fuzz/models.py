"""Random configurations of model families: patched models against their unpatched twins.

    python -m tests.fuzz.models --seeds 1000          the seeds 0 … 999
    python -m tests.fuzz.models --family afmoe llama --seeds 50 --first 7 --mode quantized

A seed draws a family and a configuration (see `tests.fuzz.configurations`), and a quantized model's schemes.
The twin of a float model is the model as it was; that of a quantized model runs the same packed weights
module by module.  Logits are compared of a prompt, of chunks after it, of decode steps, of a batch with left
padding, and of steps that compute several texts.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch_armllm
from tests.fuzz.configurations import Case, draw
from tests.support.parity import ABSORBED_TOLERANCE, TOLERANCE, expected, worst_differences
from torch_armllm import Recipe
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.recipe import kind_of

MODES = ("float", "quantized")


class Unfit(Exception):
    """The configuration is refused by transformers, or its model does not run."""


def _recipe(case: Case, model: Any) -> Recipe:
    """Draws exact schemes of a model's layers; one kind of layers may have another scheme, or none."""
    source = random.Random(case.seed)
    layers = [layer for layer in find_layers(model) if layer.reason is None]
    kinds = {kind_of(layer) for layer in layers} - {None}
    latent = any(layer.kind == "latent" for layer in layers)
    overrides: dict[str, str | None] = {}
    if kinds and source.random() < 0.4:
        kind = source.choice(sorted(map(str, kinds)))
        overrides[kind] = "int8" if kind == "experts" else source.choice((None, "int8"))
    return Recipe(
        scheme=source.choice(("int4", "int8")),
        head=source.choice(("int8", "int4", None)),
        ignore=("*kv_b_proj",) if latent and source.random() < 0.7 else (),
        overrides=overrides,
        allow_outliers=True,
        importance=False,
    )


def run(case: Case, mode: str = "float") -> str:
    """Compares a case's patched model with its unpatched twin.

    Args:
        case: the configuration.
        mode: one of `MODES`.

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
        recipe = _recipe(case, model) if mode == "quantized" else None
        if recipe is not None:
            quantize(model, recipe, progress=False)
        twin = copy.deepcopy(model)
        report = torch_armllm.patch(model, recipe, progress=False)
    if not report.captured:
        assert "other hidden states" not in str(report.capture_reason), report.capture_reason
        assert "rewrite failed" not in str(report.capture_reason), report.capture_reason
        return "modules"
    suspicious = [note for note in report.notes if "report this as a bug" in note]
    assert not suspicious, suspicious
    absorbed = recipe is not None and "int8_heads_linear" in report.ops
    tolerance = ABSORBED_TOLERANCE if absorbed else TOLERANCE
    try:
        worst = worst_differences(model, twin, tolerance)
    except UserWarning as warning:
        if "the plan supports at most" in str(warning):
            return "modules"  # its chunks of attention are shorter than the prompt
        raise
    wrong = ", ".join(f"{name} by {largest:.2g}" for name, largest in worst.items() if largest >= tolerance)
    assert not wrong, f"logits differ: {wrong}; {recipe or ''}"
    by_nodes = any("node by node" in note for note in report.notes)
    return "graph" if by_nodes else "plan"


def main(arguments: list[str]) -> int:
    """Runs the seeds, prints findings, and counts by family and mode; returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds (100)")
    parser.add_argument("--first", type=int, default=0, help="first seed (0)")
    parser.add_argument("--family", nargs="+", help="model types; default: each seed draws one")
    parser.add_argument(
        "--mode", choices=MODES, help="float or quantized weights; default: each seed in both"
    )
    options = parser.parse_args(arguments)
    modes = MODES if options.mode is None else (options.mode,)
    seeds = range(options.first, options.first + options.seeds)
    findings = 0
    for family in options.family or (None,):
        began = time.monotonic()
        counts: dict[str, Counter[str]] = {mode: Counter() for mode in modes}
        for seed in seeds:
            case = draw(seed, family)
            for mode in modes:
                counts[mode][_outcome(case, mode)] += 1
        for mode, found in counts.items():
            findings += found["finding"]
            print(family or "drawn families", mode, dict(found), flush=True)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    return 1 if findings else 0


def _outcome(case: Case, mode: str) -> str:
    """Runs a case; prints what it finds."""
    try:
        return run(case, mode)
    except Unfit:
        return "unfit"
    except Exception as error:  # noqa: BLE001 - a finding
        text = str(error).splitlines()[:1]
        print(f"FINDING {case} {mode}: {type(error).__name__}: {text}", flush=True)
        return "finding"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
