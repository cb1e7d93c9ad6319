"""Quantizing a checkpoint from folder to folder: a block of layers is in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.journal import INDEX, Journal, fingerprint
from torch_armllm.checkpoint.streamed_calibration import Hollow, forget, keep_tokens, tokens_hash
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.inplace import commit, refuse_damaged, untouched
from torch_armllm.quant.layers import Layer, Places, find_layers
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.outliers import find_outliers, refuse_outliers
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.replacement import replacement
from torch_armllm.quant.report import LayerRecord, Report
from torch_armllm.quant.skeleton import describe_modules
from torch_armllm.quant.spill_file import Spool
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.progress import progress_bar

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@torch.no_grad()
def quantize_folder(
    source: Path,
    out: Path,
    recipe: Recipe | None = None,
    restart: bool = False,
    progress: bool = True,
    calibration: Tensor | None = None,
) -> Report:
    """Quantizes a float checkpoint and writes what ``save_pretrained`` would write of it.

    The model is read block by block (a decoder layer, an embedding), quantized and written in shards, so that
    the peak memory is that of the largest block and one shard of 256 MB.  Inputs are not regarded, as while
    loading, unless the method calibrates: then each decoder layer runs over all texts when it is read, and
    is written when it is done.  After an interruption, a second call goes on where the first one was: with
    the same recipe and texts, or a recipe that asks for the same in what is done.

    Args:
        source: a folder with a config.json and safetensors files of floats.
        out: the folder of the new model; it is made, and must be empty or hold an unfinished run.
        recipe: what becomes of which layer.
        restart: begins anew where ``out`` holds an unfinished run.
        progress: shows a bar with the time left.
        calibration: token ids ``(sequences, length)``, for the methods that calibrate.

    Returns:
        What became of each layer.

    Raises:
        ValueError: the source cannot be read or is quantized already; ``out`` holds something else; a recipe
            does not fit; a weight is not finite; a layer's error is out of line with its scheme; or a method
            that calibrates has no texts, or cannot run the model layer by layer.
        OSError: a file cannot be read or written.
    """
    recipe = recipe or Recipe()
    files = weight_files(source)
    model = _empty_model(source)
    layers, schemes = recipe.assign(find_layers(model, recipe.ignore, loading=True))
    reader = BlockReader(model, files)
    hollow = None
    told = {**fingerprint(source, files), "method": recipe.method}
    if recipe.method in CALIBRATED and calibration is not None:
        wanted = [layer for layer in layers if layer.name in schemes]
        hollow = Hollow(model, reader, wanted, recipe.method, calibration, out)
        told["calibration"] = tokens_hash(calibration)
    method = (
        hollow.method if hollow is not None else make_method(recipe.method, model, layers, False, calibration)
    )
    journal = Journal(out, told, restart)
    _compare(journal.records, layers, {name: scheme.name for name, scheme in schemes.items()})
    if hollow is not None and calibration is not None:
        keep_tokens(out, calibration)
        hollow.go_on([block for block in reader.blocks if journal.holds(block)])
    done = {record.name for record in journal.records}
    left = [layer for layer in layers if layer.name not in done]
    sizes = {layer.name: sum(weight.numel() for weight in layer.weights()) for layer in layers}
    bar = progress_bar(
        show=progress,
        total=sum(sizes.values()),
        initial=sum(record.parameters for record in journal.records),
        desc="Quantizing",
        unit="w",
        unit_scale=True,
    )
    with bar:
        for block in reader.blocks:
            if journal.holds(block):
                continue
            reader.load(block)
            here = [layer for layer in left if not any(w.is_meta for w in layer.weights())]
            left = [layer for layer in left if layer not in here]
            refuse_damaged(here)
            records = []
            for layer in here:
                if layer.reason is not None:
                    records.append(untouched(layer))
                else:
                    spool = Spool(in_memory=None)
                    found = replacement(model, layer, schemes[layer.name], method, False, spool)
                    method.took(layer, found.module, spool)
                    records.append(found.record(layer))
                    commit(layer, found, spool, Places(model))
                bar.update(sizes[layer.name])
            if not recipe.allow_outliers:
                refuse_outliers([*journal.records, *records], f"{out} holds no model yet")
            modules = {n: m for n, m in describe_modules(model).items() if n not in journal.modules}
            if hollow is not None:
                hollow.finish(block)
            journal.add(block, reader.stored(), records, modules)
            if hollow is not None:
                journal.write()
                hollow.written(block)
            reader.release()
            release_free_memory()
    written = journal.finish()
    _describe(model, source, out, ArmInt4Config(**recipe.to_dict(), modules=journal.modules))
    journal.close()
    forget(out)
    order = {layer.name: place for place, layer in enumerate(layers)}
    report = Report(sorted(journal.records, key=lambda record: order[record.name]))
    report.outliers = {record.name: usual for record, usual in find_outliers(report.layers)}
    report.bytes_before, report.bytes_after = sum(file.stat().st_size for file in files), written
    return report


def weight_files(source: Path) -> list[Path]:
    """The safetensors files of a checkpoint's folder.

    Raises:
        ValueError: it has none, or is quantized already.
    """
    if not (source / "config.json").exists():
        raise ValueError(f"{source} holds no config.json: it is not a transformers checkpoint")
    config = json.loads((source / "config.json").read_text())
    if (saved := config.get("quantization_config")) is not None:
        raise ValueError(
            f"{source} is quantized already ({saved.get('quant_method', 'in some way')}): name the original "
            "model"
        )
    if (source / INDEX).exists():
        index = json.loads((source / INDEX).read_text())
        return [source / name for name in sorted(set(index["weight_map"].values()))]
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{source} holds no .safetensors files: load it with from_pretrained and save it with "
            "save_pretrained"
        )
    return files


def _empty_model(source: Path) -> Any:
    config = AutoConfig.from_pretrained(source)
    dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.tie_weights()
    return model


def _compare(records: Sequence[LayerRecord], layers: Sequence[Layer], schemes: dict[str, str]) -> None:
    """Raises ValueError if what is done already is not what the recipe asks for."""
    by_name = {layer.name: layer for layer in layers}
    for record in records:
        wanted = schemes.get(record.name)
        if record.name not in by_name or (record.scheme if record.quantized else None) != wanted:
            raise ValueError(
                f"the unfinished run has {record.name} as {record.scheme}, and it is to be "
                f"{wanted or 'left'} now: begin anew with restart=True (--restart), or name another folder"
            )


def _describe(model: nn.Module, source: Path, out: Path, quantization: ArmInt4Config) -> None:
    """Writes everything but the weights; the configuration last, as it makes the folder a model."""
    for file in sorted(source.iterdir()):
        wanted = file.is_file() and not file.name.endswith((*_WEIGHTS, ".index.json"))
        if wanted and file.name not in ("config.json", "README.md"):
            shutil.copyfile(file, out / file.name)
    config: Any = model.config
    if not (out / "generation_config.json").exists():
        GenerationConfig.from_model_config(config).save_pretrained(out)
    config.architectures = [type(model).__name__]
    config.quantization_config = quantization
    config.save_pretrained(out)
