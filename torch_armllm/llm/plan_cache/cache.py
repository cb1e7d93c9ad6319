"""Keeping the plan of a model that was loaded, and finding it again."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.kv_cache.shapes import CacheShape, LatentShape, MixedShape, Shape
from torch_armllm.llm.plan_cache import constants, entry
from torch_armllm.llm.plan_cache.key import PlanKey, stamps
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.plan_model import HeadWeights, PlanModel
from torch_armllm.plan.program import Encoded
from torch_armllm.system.dtypes import dtype_name

logger = logging.getLogger(__name__)

_COMPARED_AT_ONCE = 64 << 20  # bytes

_SHAPES = {kind.__name__: kind for kind in (CacheShape, LatentShape)}


def store(key: PlanKey, model: Any, runner: Any, tokenizer: Any = None) -> str | None:
    """Keeps what an engine runs of a model that was loaded from the key's folder.

    What is kept is read back and compared, bit by bit, with what the model computes from.

    Args:
        key: see `torch_armllm.llm.plan_cache.key.plan_key`.
        model: patched.
        runner: of the engine that runs it.
        tokenizer: that its folder holds.

    Returns:
        Why nothing was kept; None if something was.
    """
    if not isinstance(runner, PlanRunner) or not isinstance(runner.plan, NativePlan):
        return "it does not run by a native plan"
    servable, program = runner.model, runner.plan.program
    product = servable.head.weights(torch.empty(1, program.columns, dtype=program.dtype))
    if product is None:
        return "its head does more than a matrix product"
    tensors = [*program.constants, *product.tensors]
    folder = Path(key["folder"])
    described = constants.describe(tensors, model, folder)
    if described is None:
        return "its plan computes from more than the files hold"
    recipes, values = described
    if not _files_hold(tensors, recipes, values, folder):
        return "its weights are not what the files hold"
    generation = servable.generation_config
    said = {
        "name": servable.name,
        "sources": stamps(_sources(model)),
        "program": {"integers": program.integers, "floats": program.floats, "opcodes": program.opcodes},
        "result": {"columns": program.columns, "dtype": dtype_name(program.dtype)},
        "constants": recipes,
        "head": {
            "count": len(product.tensors),
            "scheme": product.scheme,
            "out_features": product.out_features,
        },
        "shape": _shape_said(servable.shape),
        "vocab_size": servable.vocab_size,
        "max_length": servable.max_length,
        "first_position": servable.first_position,
        "position_limit": servable.position_limit,
        "stated_positions": servable.stated_positions,
        "generation": None if generation is None else generation.to_dict(),
        "tokenizer": _tokenizer_said(tokenizer, folder),
    }
    entry.write(key, said, values)
    return None


def lookup(key: PlanKey) -> tuple[PlanModel, type | None] | None:
    """A model whose plan was kept, and the class of its tokenizer if that is known; None where there is none.

    Whatever is wrong with an entry is logged, and there is none then.
    """
    try:
        found = entry.read(key)
        if found is None:
            return None
        said, values = found
        if said["sources"] != stamps(Path(source[0]) for source in said["sources"]):
            return None
        return _model(said, values, key), _tokenizer_class(said["tokenizer"])
    except (ValueError, OSError, KeyError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        logger.warning("a kept plan is of no use, the model is captured anew: %s", error)
        return None


def _model(said: dict[str, Any], values: dict[str, Tensor], key: PlanKey) -> PlanModel:
    tensors = constants.make(said["constants"], values, Path(key["folder"]))
    weight, *bias = tensors[-said["head"]["count"] :]
    result = said["result"]
    program = Encoded(
        tensors[: -said["head"]["count"]],
        said["program"]["integers"],
        said["program"]["floats"],
        said["program"]["opcodes"],
        result["columns"],
        getattr(torch, result["dtype"]),
    )
    generation = said["generation"]
    return PlanModel(
        name=said["name"],
        plan=NativePlan(program),
        shape=_shape(said["shape"]),
        vocab_size=said["vocab_size"],
        max_length=said["max_length"],
        first_position=said["first_position"],
        position_limit=said["position_limit"],
        stated_positions=said["stated_positions"],
        head=HeadWeights(
            weight, bias[0] if bias else None, said["head"]["scheme"], said["head"]["out_features"]
        ),
        generation_config=None if generation is None else SimpleNamespace(**generation),
    )


def _files_hold(
    tensors: Sequence[Tensor], recipes: Sequence[constants.Recipe], values: dict[str, Tensor], folder: Path
) -> bool:
    """Whether tensors are made again bit by bit, a few at a time: all would take their memory once more."""
    begin = 0
    while begin < len(tensors):
        end, size = begin + 1, tensors[begin].nbytes
        while end < len(tensors) and size + tensors[end].nbytes <= _COMPARED_AT_ONCE:
            size += tensors[end].nbytes
            end += 1
        made = constants.make(recipes[begin:end], values, folder)
        if not all(map(_same, made, tensors[begin:end])):
            return False
        begin = end
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b.detach())]
    return torch.equal(*bits)


def _sources(model: nn.Module) -> list[Path]:
    """The files that a model's classes were read from."""
    kinds = {type(module) for module in model.modules()} | {type(getattr(model, "config", None))}
    files = (inspect.getsourcefile(kind) for kind in kinds if kind.__module__ != "builtins")
    return sorted({Path(file) for file in files if file is not None})


def _tokenizer_said(tokenizer: Any, folder: Path) -> list[str] | None:
    """A tokenizer's class, if the folder alone gives the same tokenizer by it."""
    if tokenizer is None:
        return None
    kind = type(tokenizer)
    again = kind.from_pretrained(str(folder))
    told = [_tokenizer_state(t) for t in (tokenizer, again)]
    return [kind.__module__, kind.__qualname__] if told[0] is not None and told[0] == told[1] else None


def _tokenizer_state(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    own = {name: value for name, value in vars(tokenizer).items() if _is_plain(value)}
    return backend.to_str(), own, repr(tokenizer)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | type(None) | list | dict)


def _tokenizer_class(said: list[str] | None) -> type | None:
    if said is None:
        return None
    found: type = getattr(importlib.import_module(said[0]), said[1])
    return found


def _shape_said(shape: Shape) -> dict[str, Any]:
    if isinstance(shape, MixedShape):
        return {"places": [list(p) for p in shape.places], "groups": [_shape_said(g) for g in shape.groups]}
    return {"kind": type(shape).__name__, **asdict(shape), "dtype": dtype_name(shape.dtype)}


def _shape(said: dict[str, Any]) -> Any:
    if "groups" in said:
        groups = tuple(_shape(group) for group in said["groups"])
        return MixedShape(groups, tuple((a, b) for a, b in said["places"]))
    fields = {**said, "dtype": getattr(torch, said["dtype"])}
    return _SHAPES[fields.pop("kind")](**fields)
