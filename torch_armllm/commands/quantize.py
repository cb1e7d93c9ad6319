"""``torch-armllm quantize``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torch_armllm.commands import Subcommands

if TYPE_CHECKING:
    from torch_armllm.quant.recipe import Recipe
    from torch_armllm.report import Report


def add(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command to the command line."""
    parser = commands.add_parser("quantize", help="a checkpoint becomes a quantised one, layer by layer")
    parser.add_argument("model", help="smollm2, a checkpoint's folder or a hub name")
    parser.add_argument("out", type=Path, help="the new model's folder, or that of an unfinished run")
    parser.add_argument("--scheme", default="int4", help="int4 (g32i), int8, g32, g64, g128, row, … (int4)")
    parser.add_argument("--head", default="int8", help="scheme of the output head, or none (int8)")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="PATTERN=SCHEME",
        help="a scheme, or none, of layers by name (*.down_proj=int8) or kind (experts=g64); repeatable",
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN", help="layers to leave; repeatable"
    )
    parser.add_argument("--method", default="mse", help="mse, rtn, gptq or awq (mse)")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text or .jsonl for gptq and awq; default: the model's own",
    )
    parser.add_argument("--allow-outliers", action="store_true", help="layers may lose more than is usual")
    parser.add_argument("--restart", action="store_true", help="begins an unfinished run anew")
    parser.add_argument("--json", action="store_true", help="the report as JSON, and no bar")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Quantises, and prints the report."""
    import json

    from torch_armllm.checkpoint import checkpoint_folder
    from torch_armllm.quant.folder import quantize_folder
    from torch_armllm.quant.method import CALIBRATED
    from torch_armllm.quant.recipe import Recipe

    recipe = Recipe(
        options.scheme,
        _scheme(options.head),
        options.ignore,
        dict(_override(text) for text in options.override),
        options.method,
        options.allow_outliers,
    )
    source = checkpoint_folder(options.model)
    progress = not options.json
    if recipe.method in CALIBRATED:
        report = _calibrate(source, options.out, recipe, options.calibration, progress)
    elif options.calibration is not None:
        raise ValueError(f"--calibration is for {' and '.join(CALIBRATED)}, not for {recipe.method}")
    else:
        report = quantize_folder(source, options.out, recipe, options.restart, progress)
    print(json.dumps(report.to_dict()) if options.json else report, flush=True)


def _calibrate(source: Path, out: Path, recipe: Recipe, file: Path | None, progress: bool) -> Report:
    """Quantises a model that is in memory as a whole, and saves it."""
    from torch_armllm.checkpoint import load_model, load_tokenizer
    from torch_armllm.quant.calibration.text import own_tokens, read_tokens
    from torch_armllm.quant.quantizer import quantize_by
    from torch_armllm.report import Report

    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: name a new folder")
    model, tokenizer = load_model(str(source), "auto"), load_tokenizer(str(source))
    tokens = own_tokens(model) if file is None else read_tokens(file, tokenizer)
    report = Report(quantize_by(recipe, model, progress=progress, calibration=tokens))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return report


def _scheme(text: str) -> str | None:
    return None if text == "none" else text


def _override(text: str) -> tuple[str, str | None]:
    pattern, separator, scheme = text.rpartition("=")
    if not separator or not pattern:
        raise ValueError(f"--override takes PATTERN=SCHEME, such as '*.down_proj=int8', not {text!r}")
    return pattern, _scheme(scheme)
