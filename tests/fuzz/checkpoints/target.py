"""Targets that load mutated checkpoints.

A mutant loads to the tensors of the valid checkpoint, or to others that are finite if the values of its own
tensors were changed, or an error of the families ValueError and OSError says what is wrong.
"""

from __future__ import annotations

import logging
import random
import shutil
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.fuzz.checkpoints import corpus
from tests.fuzz.checkpoints.mutations import STRUCTURE, mutate, mutate_gguf
from torch_armllm import Recipe, load
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear

_EXPECTED = (ValueError, OSError)
_UNNAMED = 8
"""A message that is shorter says nothing."""


class Finding(Exception):
    """A mutant that loads wrongly, or an error that says too little."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns all weights of a model by name, dequantized."""
    found = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            found[f"{name}.weight"] = module.dequantize()
        elif isinstance(module, QuantExperts):
            inner, outer = module.dequantize()
            found[f"{name}.inner"], found[f"{name}.outer"] = inner, outer
        elif isinstance(module, nn.Module) and hasattr(module, "rest"):
            found[f"{name}.rest"] = module.rest
    return found


def load_floats(source: Path) -> dict[str, Tensor]:
    """Loads a checkpoint, without the passes, and returns its weights."""
    recipe = Recipe(head=None, importance=False, allow_outliers=True)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return tensors_of(load(str(source), recipe, fuse=False))
    finally:
        logging.disable(before)


@cache
def _expected(kind: str) -> dict[str, Tensor]:
    return load_floats(corpus.valid(kind))


def run(kind: str, seed: int) -> None:
    """Mutates the valid checkpoint of a kind, and loads it.

    Raises:
        Finding: the weights are wrong or not finite, or the error says nothing.
        Exception: an error of another family.
    """
    expected, valid = _expected(kind), corpus.valid(kind)
    target = corpus.scratch() / valid.name
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    random_ = random.Random(f"{kind} {seed}")
    if valid.is_dir():
        shutil.copytree(valid, target)
        changed = mutate(target, random_)
    else:
        shutil.copy(valid, target)
        changed = mutate_gguf(target, random_)
    try:
        found = load_floats(target)
    except _EXPECTED as error:
        if len(str(error)) < _UNNAMED:
            raise Finding(f"{type(error).__name__}: {error}: what is wrong?") from error
        return
    _check(found, expected, changed)


def _check(found: dict[str, Tensor], expected: dict[str, Tensor], changed: str) -> None:
    for name, value in found.items():
        if "embed" not in name and not bool(value.isfinite().all()):
            raise Finding(f"{name} is not finite")
    if changed == STRUCTURE:
        for name, value in expected.items():
            if name not in found:
                raise Finding(f"the model has no {name}, and loads")
            if found[name].shape != value.shape or not torch.equal(found[name].float(), value.float()):
                raise Finding(f"{name} has other values")
        if more := sorted(set(found) - set(expected)):
            raise Finding(f"the model has {more[0]}, which is not in the checkpoint")


saved = partial(run, "saved")
experts = partial(run, "experts")
gptq = partial(run, "gptq")
awq = partial(run, "awq")
awq_gemv = partial(run, "awq_gemv")
compressed_tensors = partial(run, "compressed_tensors")
torchao = partial(run, "torchao")
mxfp4 = partial(run, "mxfp4")
gguf = partial(run, "gguf")
floats = partial(run, "floats")
