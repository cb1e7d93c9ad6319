"""Quantization of a checkpoint from folder to folder, with one block of layers in memory at a time."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.empty_model import empty_model
from torch_armllm.checkpoint.journal import Journal, fingerprint
from torch_armllm.checkpoint.load import auto_class
from torch_armllm.checkpoint.measured_blocks import measured_by_blocks
from torch_armllm.checkpoint.model_config import check_one_stack, read_config
from torch_armllm.checkpoint.own_head import untie_own_head
from torch_armllm.checkpoint.pretrained import refuse_adapter
from torch_armllm.checkpoint.streamed_calibration import (
    NoCalibration,
    StreamedCalibration,
    remove_calibration_files,
)
from torch_armllm.checkpoint.weight_files import SAFETENSORS, weight_files
from torch_armllm.checkpoint.written import check_written
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layer_quantizer import LayerQuantizer
from torch_armllm.quant.layers import Layer, check_finite, find_layers
from torch_armllm.quant.methods.base import CALIBRATED, Method
from torch_armllm.quant.methods.calibrated.layerwise import NotByLayersError
from torch_armllm.quant.methods.importance import random_tokens
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.mixed_bits import budget, candidates, with_bits
from torch_armllm.quant.outliers import find_outliers, refuse_outliers
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import LayerRecord, Report
from torch_armllm.quant.schemes.base import Scheme
from torch_armllm.quant.skeleton import describe_modules
from torch_armllm.quant.spill_file import SpillFile
from torch_armllm.quant.wide_activations import wide_layers
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.default_dtype import Float32ByDefault
from torch_armllm.system.inner_paths import is_inner
from torch_armllm.system.progress import progress_bar

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


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
    source, out = Path(source), Path(out)
    recipe = Recipe.of(quantization)
    files = _float_weight_files(source)
    refuse_adapter(str(source))
    model = _empty_model(source)
    layers, schemes = recipe.assign(find_layers(model, recipe.ignore, loading=True))
    reader = BlockReader(model, files)
    quantized = [layer for layer in layers if layer.name in schemes]
    streamed = _calibration_of(recipe, model, reader, quantized, calibration, out)
    inputs = {**fingerprint(source, files), "method": recipe.method, **streamed.fingerprint}
    inputs["int16_activations"] = list(recipe.int16_activations)
    inputs["rotate"] = recipe.rotate
    if recipe.bits is not None:
        inputs["bits"] = recipe.bits
        metadata = sum(file.stat().st_size for file in _metadata_files(source))
        room = budget(recipe, model, layers, schemes, metadata)
    journal = Journal(out, inputs, restart)
    if recipe.bits is not None:
        chosen = candidates(recipe, layers, schemes)
        recipe = _with_bits(recipe, model, reader, chosen, room, calibration, journal, progress)
        layers, schemes = recipe.assign(layers)
    wide = wide_layers(recipe, layers, schemes)
    _check_resumable(journal.records, layers, schemes)
    streamed.resume([block for block in reader.blocks if journal.holds(block)])
    calibrated = recipe.method in CALIBRATED
    quantizer = _BlockQuantizer(model, layers, schemes, wide, streamed.method, journal.records, progress)
    with quantizer.bar:
        for block in reader.blocks:
            if journal.holds(block):
                continue
            reader.load(block)
            records = quantizer.quantize_loaded()
            if not recipe.allow_outliers:
                refuse_outliers([*journal.records, *records], f"{out} holds no model yet", calibrated)
            modules = {n: m for n, m in describe_modules(model).items() if n not in journal.modules}
            streamed.finish_block(block)
            journal.add(block, reader.loaded_tensors(), records, modules)
            streamed.commit_block(block, journal)
            reader.release()
            release_free_memory()
    written = journal.finish()
    _write_metadata(model, source, out, ArmInt4Config(recipe, modules=journal.modules))
    check_written(out)
    remove_calibration_files(out)
    journal.close()  # last: without it, what an interrupted run leaves would be a stranger's folder
    positions = {layer.name: position for position, layer in enumerate(layers)}
    report = Report(sorted(journal.records, key=lambda record: positions[record.name]))
    report.outliers = {record.name: usual for record, usual in find_outliers(report.layers, calibrated)}
    report.bytes_before, report.bytes_after = sum(file.stat().st_size for file in files), written
    return report


def _calibration_of(
    recipe: Recipe,
    model: Any,
    reader: BlockReader,
    layers: Sequence[Layer],
    tokens: Tensor | None,
    out: Path,
) -> StreamedCalibration | NoCalibration:
    """Returns the method of a recipe, and what it runs as blocks are read."""
    if recipe.method in CALIBRATED and tokens is not None:
        return StreamedCalibration(model, reader, layers, recipe, tokens, out)
    measures = recipe.method == "mse" and recipe.importance is not False
    if measures and (tokens is None or recipe.bits is not None):
        try:
            return StreamedCalibration(model, reader, layers, recipe, None, out)
        except NotByLayersError as error:
            logger.warning("%s: weights are rounded without input statistics", error)
    calibration = tokens if recipe.method in CALIBRATED or recipe.bits is None else None
    method = make_method(recipe.method, model, layers, calibration=calibration, rotate=recipe.rotate)
    return NoCalibration(method)


def _with_bits(
    recipe: Recipe,
    model: Any,
    reader: BlockReader,
    layers: Sequence[Layer],
    room: float,
    tokens: Tensor | None,
    journal: Journal,
    progress: bool,
) -> Recipe:
    """Returns the recipe with the overrides that `Recipe.bits` leads to, or those of an unfinished run."""
    if journal.overrides is None:
        tokens = random_tokens(model) if tokens is None else tokens
        sensitivities = measured_by_blocks(model, reader, layers, tokens, progress)
        journal.choose(with_bits(recipe, sensitivities, room).overrides)
    return replace(recipe, overrides=journal.overrides or {})


class _BlockQuantizer:
    """Quantizes the layers of a model as their blocks are loaded.

    Attributes:
        bar: the progress bar, in weights.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        schemes: Mapping[str, Scheme],
        wide: Collection[str],
        method: Method,
        finished: Sequence[LayerRecord],
        progress: bool,
    ) -> None:
        self._quantizer = LayerQuantizer(model, schemes, method, spill=SpillFile(in_memory=None), wide=wide)
        self._sizes = {layer.name: sum(weight.numel() for weight in layer.weights()) for layer in layers}
        done = {record.name for record in finished}
        self._remaining = [layer for layer in layers if layer.name not in done]
        self.bar = progress_bar(
            show=progress,
            total=sum(self._sizes.values()),
            initial=sum(record.parameters for record in finished),
            desc="Quantizing",
            unit="w",
            unit_scale=True,
        )

    def quantize_loaded(self) -> list[LayerRecord]:
        """Replaces the layers whose weights are all in memory, and returns their records.

        Raises:
            ValueError: a weight is not finite.
        """
        loaded = [layer for layer in self._remaining if not any(weight.is_meta for weight in layer.weights())]
        self._remaining = [layer for layer in self._remaining if layer not in loaded]
        check_finite(loaded)
        records = []
        for layer in loaded:
            if layer.reason is not None:
                records.append(LayerRecord.unquantized(layer))
            else:
                records.append(self._quantizer.run(layer))
                self._quantizer.commit(layer)
            self.bar.update(self._sizes[layer.name])
        return records


def _float_weight_files(source: Path) -> list[Path]:
    """Returns the safetensors files of a float checkpoint.

    Raises:
        ValueError: the folder has none, or the checkpoint is already quantized.
    """
    if not source.exists():
        raise ValueError(f"{source} does not exist: give the folder of a float checkpoint")
    if not (source / "config.json").exists():
        raise ValueError(f"{source} holds no config.json: it is not a transformers checkpoint")
    config = json.loads((source / "config.json").read_text())
    if (saved := config.get("quantization_config")) is not None:
        raise ValueError(
            f"{source} is quantized already ({saved.get('quant_method', 'in some way')}): name the original "
            "model"
        )
    if not any(source.glob("*.safetensors*")):
        raise ValueError(
            f"{source} holds no .safetensors files: load it with from_pretrained and save it with "
            "save_pretrained"
        )
    return weight_files(str(source), SAFETENSORS)


def _empty_model(source: Path) -> Any:
    config = read_config(str(source))
    check_one_stack(str(source), config)
    untie_own_head(auto_class(config), str(source), config)
    dtype = getattr(config, "dtype", None) or torch.float32
    model = empty_model(auto_class(config), config, str(source), dtype)
    model.tie_weights()
    return model


def _check_resumable(
    records: Sequence[LayerRecord], layers: Sequence[Layer], schemes: Mapping[str, Scheme]
) -> None:
    """Raises ValueError if a finished layer of an unfinished run has another scheme in the recipe."""
    by_name = {layer.name: layer for layer in layers}
    for record in records:
        scheme = schemes.get(record.name)
        expected = None if scheme is None else scheme.name
        if record.name not in by_name or (record.scheme if record.quantized else None) != expected:
            raise ValueError(
                f"the unfinished run has {record.name} as {record.scheme}, and the recipe says "
                f"{expected or 'not quantized'}: start over with restart=True (--restart), or name another "
                "folder"
            )


_MODULE_FOLDER = re.compile(r"\d+_[A-Z]\w*")
"""Names of the folders of sentence-transformers, such as 1_Pooling."""


def _metadata_files(source: Path) -> list[Path]:
    """Returns the files of a checkpoint that the new folder has too, such as those of the tokenizer."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file.name != "README.md" and not file.name.endswith((*_WEIGHTS, ".index.json"))
    ]


def _write_metadata(model: nn.Module, source: Path, out: Path, quantization: ArmInt4Config) -> None:
    """Writes everything but the weights; config.json last, since it makes the folder a model."""
    for file in _metadata_files(source):
        if file.name != "config.json":
            if not is_inner(file, source):
                logger.warning("%s is a link: the new folder has a copy of %s", file, file.resolve())
            shutil.copyfile(file, out / file.name)
    for folder in source.iterdir():
        if folder.is_dir() and _MODULE_FOLDER.fullmatch(folder.name):
            shutil.copytree(folder, out / folder.name, dirs_exist_ok=True)
    config: Any = model.config
    if not (out / "generation_config.json").exists():
        GenerationConfig.from_model_config(config).save_pretrained(out)
    config.architectures = [type(model).__name__]
    config.quantization_config = quantization
    config.save_pretrained(out)
