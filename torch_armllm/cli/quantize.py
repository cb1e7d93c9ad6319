"""``torch-armllm quantize``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torch_armllm.cli import Subcommands

if TYPE_CHECKING:
    from torch import Tensor

    from torch_armllm.quant.recipe import Recipe
    from torch_armllm.quant.report import Report


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command to the command line."""
    parser = commands.add_parser("quantize", help="a checkpoint becomes a quantized one, layer by layer")
    parser.add_argument("model", help="smollm2, a checkpoint's folder, a GGUF file or a hub name")
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
    """Quantizes, and prints the report."""
    import json

    from torch_armllm.quant.recipe import Recipe

    recipe = Recipe(
        options.scheme,
        _scheme(options.head),
        options.ignore,
        dict(_override(text) for text in options.override),
        options.method,
        options.allow_outliers,
    )
    report = _report(options, recipe)
    print(json.dumps(report.to_dict()) if options.json else report, flush=True)


def _report(options: argparse.Namespace, recipe: Recipe) -> Report:
    from torch_armllm.checkpoint.load import checkpoint_folder, is_foreign
    from torch_armllm.checkpoint.quantize_folder import quantize_folder
    from torch_armllm.quant.methods.base import CALIBRATED

    if options.calibration is not None and recipe.method not in CALIBRATED:
        raise ValueError(f"--calibration is for {' and '.join(CALIBRATED)}, not for {recipe.method}")
    if is_foreign(options.model):
        return _anew(options.model, options.out, recipe)
    source = checkpoint_folder(options.model)
    calibration = None
    if recipe.method in CALIBRATED:
        calibration = _texts(source, options.out, options.calibration, options.restart)
    return quantize_folder(
        source, options.out, recipe, options.restart, not options.json, calibration=calibration
    )


def _anew(source: str, out: Path, recipe: Recipe) -> Report:
    """Quantizes what another tool had quantized, layer by layer, and saves it."""
    from torch_armllm.checkpoint.load import load, load_tokenizer
    from torch_armllm.quant.config import ArmInt4Config
    from torch_armllm.quant.methods.base import CALIBRATED

    if recipe.method in CALIBRATED:
        raise ValueError(
            f"{source} is quantized already, and method {recipe.method!r} calibrates folders of floats: take "
            "mse or rtn, or name the original model"
        )
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: name a new folder")
    model = load(source, ArmInt4Config(**recipe.to_dict(), fuse=False), scheme=recipe.scheme)
    model.hf_quantizer.quantization_config.fuse = True  # when it is loaded
    model.save_pretrained(out)
    load_tokenizer(source).save_pretrained(out)
    report: Report = model.hf_quantizer.report
    return report


def _texts(source: Path, out: Path, file: Path | None, restart: bool) -> Tensor:
    """Token ids to calibrate with: a file's, those of the unfinished run, or what the model writes."""
    from torch_armllm.checkpoint.streamed_calibration import kept_tokens
    from torch_armllm.llm.calibration_text import calibration_tokens

    kept = None if restart or file is not None else kept_tokens(out)
    return calibration_tokens(str(source), file) if kept is None else kept


def _scheme(text: str) -> str | None:
    return None if text == "none" else text


def _override(text: str) -> tuple[str, str | None]:
    pattern, separator, scheme = text.rpartition("=")
    if not separator or not pattern:
        raise ValueError(f"--override takes PATTERN=SCHEME, such as '*.down_proj=int8', not {text!r}")
    return pattern, _scheme(scheme)
