"""Quantization of a checkpoint from folder to folder, with one block of layers in memory at a time."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.float_checkpoint import FloatCheckpoint
from torch_armllm.checkpoint.folder_metadata import write_metadata
from torch_armllm.checkpoint.journal import Journal
from torch_armllm.checkpoint.stage_blocks import measured_by_blocks
from torch_armllm.checkpoint.streamed_calibration import Calibration, choose_method, remove_calibration_files
from torch_armllm.checkpoint.written import check_written
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layers import check_finite
from torch_armllm.quant.methods.importance import random_tokens
from torch_armllm.quant.mixed_bits import budget, candidates, with_bits
from torch_armllm.quant.outliers import find_outliers
from torch_armllm.quant.quantization import Quantization
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import LayerRecord, Report
from torch_armllm.quant.skeleton import describe_modules
from torch_armllm.quant.spill_file import SpillFile
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.default_dtype import Float32ByDefault
from torch_armllm.system.progress import progress_bar


@torch.no_grad()
@Float32ByDefault()
def quantize_folder(
    source: str | PathLike[str],
    out: str | PathLike[str],
    quantization: str | Recipe = "int4",
    *,
    restart: bool = False,
    progress: bool = True,
    calibration: Tensor | None = None,
) -> Report:
    """Quantizes a float checkpoint and writes the files that ``save_pretrained`` would write.

    The model is read in blocks (a decoder layer, an embedding), quantized and written in shards: the peak
    memory is that of the largest block and one shard of 256 MB.  Each decoder layer runs over all calibration
    sequences when it is read, random ones for the method ``mse``, and is written when it is quantized.

    After an interruption, a second call resumes the run.  It needs the same calibration tokens, and a recipe
    that agrees with the finished layers.

    Args:
        source: a folder with a config.json and safetensors files of floats.
        out: the folder of the new model; it is created, and must be empty or hold an unfinished run.
        quantization: the name of a scheme, or a `Recipe`.
        restart: discards an unfinished run in ``out``.
        progress: shows a bar with the time left.
        calibration: token ids ``(sequences, length)`` for calibrating methods, and for `Recipe.bits`.

    Returns:
        The report, with a record for each layer.

    Raises:
        ValueError: the source cannot be read or is quantized already; ``out`` holds something else; the
            recipe does not match the model; a weight is not finite; a layer's error is an outlier for its
            scheme; or a calibrating method has no tokens, or cannot run the model layer by layer.
        OSError: a file cannot be read or written.
    """
    recipe, out = Recipe.of(quantization), Path(out)
    checkpoint = FloatCheckpoint(Path(source))
    model = checkpoint.empty_model()
    run = Quantization(model, recipe, loading=True, spill=SpillFile(in_memory=None))
    reader = BlockReader(model, checkpoint.files)
    streamed = choose_method(run, reader, calibration, out)
    room = None if recipe.bits is None else budget(run, sum(x.stat().st_size for x in checkpoint.metadata))
    inputs = {**checkpoint.fingerprint, **streamed.fingerprint, **_settings(recipe)}
    journal = Journal(out, inputs, restart)
    if room is not None:
        if journal.overrides is None:
            tokens = random_tokens(model) if calibration is None else calibration
            sensitivities = measured_by_blocks(model, reader, candidates(run), tokens, progress)
            journal.choose(with_bits(recipe, sensitivities, room).overrides)
        run.assign(replace(recipe, overrides=journal.overrides or {}))
    _resume(run, journal)
    streamed.resume([block for block in reader.blocks if journal.holds(block)])
    _quantize_blocks(run, reader, streamed, journal, progress)
    written = journal.finish()
    write_metadata(model, checkpoint, out, ArmInt4Config(run.recipe, modules=journal.modules))
    check_written(out)
    remove_calibration_files(out)
    journal.close()  # last: without it, what an interrupted run leaves would be a stranger's folder
    report = Report(run.records)
    report.outliers = {record.name: usual for record, usual in find_outliers(report.layers, run.calibrated)}
    report.bytes_before, report.bytes_after = sum(x.stat().st_size for x in checkpoint.files), written
    return report


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Returns what a run must have in common with the unfinished one that it resumes."""
    settings = {
        "method": recipe.method,
        "int16_activations": list(recipe.int16_activations),
        "rotate": recipe.rotate,
    }
    return settings if recipe.bits is None else {**settings, "bits": recipe.bits}


def _resume(run: Quantization, journal: Journal) -> None:
    """Takes over the layers that an unfinished run has finished.

    Raises:
        ValueError: a finished layer has another scheme in the recipe.
    """
    names = {layer.name for layer in run.layers}
    for record in journal.records:
        scheme = run.schemes.get(record.name)
        expected = None if scheme is None else scheme.name
        if record.name not in names or (record.scheme if record.quantized else None) != expected:
            raise ValueError(
                f"the unfinished run has {record.name} as {record.scheme}, and the recipe says "
                f"{expected or 'not quantized'}: start over with restart=True (--restart), or name another "
                "folder"
            )
        run.finished[record.name] = record


def _quantize_blocks(
    run: Quantization, reader: BlockReader, streamed: Calibration, journal: Journal, progress: bool
) -> None:
    """Reads the blocks that are left one by one, quantizes their layers and writes them."""
    bar = progress_bar(
        show=progress,
        total=sum(weight.numel() for layer in run.layers for weight in layer.weights()),
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
            records = _replace_loaded(run, bar)
            run.refuse_outliers(f"{journal.folder} holds no model yet")
            modules = {n: m for n, m in describe_modules(run.model).items() if n not in journal.modules}
            streamed.finish_block(block)
            journal.add(block, reader.loaded_tensors(), records, modules)
            streamed.commit_block(block, journal)
            reader.release()
            release_free_memory()


def _replace_loaded(run: Quantization, bar: Any) -> list[LayerRecord]:
    """Replaces the layers whose weights are all in memory, and returns their records."""
    left = [layer for layer in run.layers if layer.name not in run.finished]
    loaded = [layer for layer in left if not any(weight.is_meta for weight in layer.weights())]
    check_finite(loaded)
    for layer in loaded:
        bar.update(run.replace(layer).parameters)
    return [run.finished[layer.name] for layer in loaded]
