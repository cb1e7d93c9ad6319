"""Stores the plan of a loaded model, and restores it in later processes."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.sample import Sample, sample_ids
from torch_armllm.engine.settings.memory_limit import MemoryLimit, MemoryLimitError
from torch_armllm.llm.plan_cache import constants, entry
from torch_armllm.llm.plan_cache.disk_experts import disk_experts
from torch_armllm.llm.plan_cache.key import PlanKey, stamps
from torch_armllm.llm.plan_cache.shapes import describe_shape, shape_of
from torch_armllm.plan.expert_layers import with_strides
from torch_armllm.plan.expert_store import ExpertStore
from torch_armllm.plan.native import NativePlan, native_plan
from torch_armllm.plan.placed_program import PlacedProgram, decode
from torch_armllm.plan.plan_model import HeadWeights, LogitScaling, PlanModel
from torch_armllm.plan.sample_steps import plan_error, sample_hidden
from torch_armllm.system.files import format_bytes

logger = logging.getLogger(__name__)

_CHECKED_TOKENS = 14
"""Tokens of the sample that checks a restored plan: a prompt and a decode step."""
_MAX_ERROR = 0.1
"""The same plan computes the same bits; other kernel variants round differently."""
_COMPARED_AT_ONCE = 64 << 20  # bytes


def store(key: PlanKey, model: Any, runner: Any, tokenizer: Any = None) -> str | None:
    """Stores the plan of a model that was loaded from the key's folder.

    Before it is stored, the plan's constants are rebuilt from the folder's files and compared bit by bit.

    Args:
        key: see `torch_armllm.llm.plan_cache.key.plan_key`.
        model: a patched model.
        runner: of its engine.
        tokenizer: the one in its folder; None: unknown.

    Returns:
        The reason why the plan was not stored; None if it was.
    """
    plan = native_plan(runner.plan)
    if plan is None:
        return "the model does not run by a native plan"
    servable, program = runner.executor.model, plan.program
    product = servable.head.weights(torch.empty(1, program.columns, dtype=program.dtype))
    if product is None:
        return "its LM head is more than a matrix product"
    tensors = [*program.constants, *product.tensors]
    folder = Path(key["folder"])
    described = constants.describe(tensors, model, folder)
    if described is None:
        return "too many of its constants are not in the checkpoint's files"
    sources, values = described
    if not _files_hold(tensors, sources, values, folder):
        return "its weights differ from the checkpoint's files"
    generation = servable.generation_config
    _, integers, floats = program.encode()
    metadata = {
        "name": servable.name,
        "sources": stamps(_sources(model)),
        "program": {"integers": integers, "floats": floats},
        "constants": sources,
        "head": {
            "count": len(product.tensors),
            "scheme": product.scheme,
            "out_features": product.out_features,
            "digits": product.digits,
            "rotated": product.rotated,
            "scaling": None if product.scaling is None else [product.scaling.op, product.scaling.number],
        },
        "shape": describe_shape(servable.shape),
        "vocab_size": servable.vocab_size,
        "max_length": servable.max_length,
        "first_position": servable.first_position,
        "position_limit": servable.position_limit,
        "stated_positions": servable.stated_positions,
        "generation": None if generation is None else generation.to_dict(),
        "tokenizer": _tokenizer_class_path(tokenizer, folder),
    }
    entry.write(key, metadata, values | _check_values(servable, plan))
    return None


def lookup(
    key: PlanKey, limit: MemoryLimit | None = None, free: int = 0
) -> tuple[PlanModel, type | None] | None:
    """Returns a cached model and the class of its tokenizer, if known; None if nothing is cached.

    Problems with an entry are logged as warnings, and count as nothing cached.

    Args:
        key: see `torch_armllm.llm.plan_cache.key.plan_key`.
        limit: of the model's memory; experts that do not fit stay on disk.
        free: bytes that are free; for the limit.

    Raises:
        MemoryLimitError: the model cannot run within a limit that the user has set.
    """
    try:
        cached = entry.read(key)
        if cached is None:
            return None
        metadata, values = cached
        if metadata["sources"] != stamps(Path(source[0]) for source in metadata["sources"]):
            return None
        model = _model(metadata, values, key, limit, free)
        sample = Sample(values["check_ids"], values["check_positions"], values["check_hidden"])
        if not (error := plan_error(sample, model.plan, model.shape)) <= _MAX_ERROR:
            raise ValueError(f"its hidden states differ from the stored ones by {error:.1g} (relative)")
        return model, _tokenizer_class(metadata["tokenizer"])
    except MemoryLimitError:
        raise
    except (ValueError, OSError, KeyError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        logger.warning("no cached plan can be used, so the model is captured again: %s", error)
        return None


def _model(
    metadata: dict[str, Any], values: dict[str, Tensor], key: PlanKey, limit: MemoryLimit | None, free: int
) -> PlanModel:
    program, tensors, experts = _program(metadata, values, Path(key["folder"]), limit, free)
    weight, *bias = tensors[-metadata["head"]["count"] :]
    scaling = metadata["head"]["scaling"]
    generation = metadata["generation"]
    return PlanModel(
        name=metadata["name"],
        plan=NativePlan(program, experts),
        shape=shape_of(metadata["shape"]),
        vocab_size=metadata["vocab_size"],
        max_length=metadata["max_length"],
        first_position=metadata["first_position"],
        position_limit=metadata["position_limit"],
        stated_positions=metadata["stated_positions"],
        head=HeadWeights(
            weight=weight,
            bias=bias[0] if bias else None,
            scheme=metadata["head"]["scheme"],
            out_features=metadata["head"]["out_features"],
            scaling=scaling and LogitScaling(*scaling),
            digits=metadata["head"]["digits"],
            rotated=metadata["head"]["rotated"],
        ),
        generation_config=None if generation is None else SimpleNamespace(**generation),
    )


def _program(
    metadata: dict[str, Any],
    values: dict[str, Tensor],
    folder: Path,
    limit: MemoryLimit | None,
    free: int,
) -> tuple[PlacedProgram, list[Tensor], ExpertStore | None]:
    """Returns the program, its constants and the head's, and the store of the experts that stay on disk."""
    sources, stored = metadata["constants"], metadata["program"]
    own = len(sources) - metadata["head"]["count"]
    program = decode([], stored["integers"], stored["floats"])

    def whole() -> tuple[PlacedProgram, list[Tensor], None]:
        tensors = constants.rebuild(sources, values, folder)
        return replace(program, constants=tensors[:own]), tensors, None

    if limit is None or (total := constants.total_bytes(sources, values, folder)) <= limit.weights:
        return whole()
    on_disk = disk_experts(program, sources, folder)
    if on_disk is None:
        if not limit.is_chosen:
            limit.check(total, 0, free)
        return whole()
    fixed = total - on_disk.nbytes
    limit.check(fixed, max(on_disk.layer_bytes()), free)
    tensors = constants.rebuild(sources, values, folder, on_disk.names)
    names = {
        source["name"]: tensor for source, tensor in zip(sources, tensors, strict=True) if "name" in source
    }
    budget = limit.weights - fixed
    store = on_disk.open(budget, names)
    logger.info(
        "%s of the model's %s stay on disk: experts are read when a step needs them, and up to %s of them "
        "are kept in memory",
        format_bytes(on_disk.nbytes),
        format_bytes(total),
        format_bytes(budget),
    )
    program = with_strides(replace(program, constants=tensors[:own]), on_disk.changed, tensors)
    return program, tensors, store


def _check_values(model: Any, plan: NativePlan) -> dict[str, Tensor]:
    """Returns the hidden states of a sample, which the restored plan has to reproduce."""
    limit = model.position_limit
    limits = (_CHECKED_TOKENS, model.max_length, limit and limit - model.first_position)
    ids = sample_ids(model.vocab_size, min(n for n in limits if n))
    positions = model.first_position + torch.arange(ids.shape[1])[None]
    hidden = sample_hidden(plan, model.shape, ids, positions)
    return {"check_ids": ids, "check_positions": positions, "check_hidden": hidden}


def _files_hold(
    tensors: Sequence[Tensor], sources: Sequence[constants.Source], values: dict[str, Tensor], folder: Path
) -> bool:
    """True if the files yield the same bits; compares a few tensors at a time, to save memory."""
    begin = 0
    while begin < len(tensors):
        end, size = begin + 1, tensors[begin].nbytes
        while end < len(tensors) and size + tensors[end].nbytes <= _COMPARED_AT_ONCE:
            size += tensors[end].nbytes
            end += 1
        rebuilt = constants.rebuild(sources[begin:end], values, folder)
        if not all(map(_same, rebuilt, tensors[begin:end])):
            return False
        begin = end
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b.detach())]
    return torch.equal(*bits)


def _sources(model: nn.Module) -> list[Path]:
    """Returns the source files of a model's classes."""
    kinds = {type(module) for module in model.modules()} | {type(getattr(model, "config", None))}
    files = (inspect.getsourcefile(kind) for kind in kinds if kind.__module__ != "builtins")
    return sorted({Path(file) for file in files if file is not None})


def _tokenizer_class_path(tokenizer: Any, folder: Path) -> list[str] | None:
    """Returns module and name of a tokenizer's class, if it loads the same tokenizer from the folder."""
    if tokenizer is None:
        return None
    kind = type(tokenizer)
    reloaded = kind.from_pretrained(str(folder))
    states = [_tokenizer_state(t) for t in (tokenizer, reloaded)]
    return [kind.__module__, kind.__qualname__] if states[0] is not None and states[0] == states[1] else None


def _tokenizer_state(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    settings = {name: value for name, value in vars(tokenizer).items() if _is_plain(value)}
    return backend.to_str(), settings, repr(tokenizer)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | type(None) | list | dict)


def _tokenizer_class(path: list[str] | None) -> type | None:
    if path is None:
        return None
    tokenizer_class: type = getattr(importlib.import_module(path[0]), path[1])
    return tokenizer_class
