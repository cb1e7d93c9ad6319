"""Tuning of the row scales in a folder of quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from torch_armllm.checkpoint.load import load, load_model
from torch_armllm.checkpoint.saved_metadata import make_record
from torch_armllm.checkpoint.shard import write_shard
from torch_armllm.checkpoint.weight_files import SAFETENSORS, weight_files
from torch_armllm.checkpoint.written import check_written
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.scale_tuning import Tuned, tune_scales
from torch_armllm.system.files import atomic_file


def tune_folder(source: str, out: Path, tokens: Tensor, *, progress: bool = True) -> Tuned:
    """Tunes the row scales of a quantized folder, in place: see `tune_scales`.

    All new files are written before the first of them replaces an old one, so an error leaves the folder as
    it was.

    Args:
        source: the float model that the folder was made of: see `load_model`.
        out: a folder that `quantize_folder` or ``save_pretrained`` wrote.
        tokens: ids (texts, length) to tune on.
        progress: show a progress bar.

    Raises:
        ValueError: the model cannot be tuned: see `tune_scales`.
        OSError: a file cannot be read or written.
    """
    teacher = load_model(source, "auto")
    model = load(str(out), fuse=False)
    old = {f"{name}.weight_packed": m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    panels = {name: module.weight_packed for name, module in old.items()}
    tuned = tune_scales(model, teacher, tokens, progress=progress)
    changed = {n: module.weight_packed for n, module in old.items() if module.weight_packed is not panels[n]}
    _replace(weight_files(str(out), SAFETENSORS), changed)
    check_written(out)
    return tuned


def _replace(files: list[Path], changed: Mapping[str, Tensor]) -> None:
    """Writes new tensors into safetensors files that hold tensors of the same names."""
    missing = set(changed)
    with ExitStack() as stack:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                metadata = dict(opened.metadata() or {})
                own = changed.keys() & set(opened.keys())
                if not own:
                    continue
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            tensors.update((name, changed[name]) for name in own)
            missing -= own
            sums = make_record(tensors, {})["tensors"] if "tensors" in metadata else None
            metadata |= {} if sums is None else {"tensors": sums}
            write_shard(tensors, stack.enter_context(atomic_file(file)), metadata, file.stat().st_mode)
        if missing:
            raise ValueError(
                f"{files[0].parent} holds no tensor {min(missing)}: its tensors have other names"
            )
