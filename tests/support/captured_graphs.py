"""Captured graphs of tiny models, kept for the next test that captures a model of the same structure.

Exporting is most of a test's time.  A kept graph takes the weights of the model at hand, and `capture`
compares its results with that model's modules, as it does with every graph.  Graphs are kept on disk, too,
unless a test has changed a function that they are made of.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from tests.support.graph_folder import ROOT, GraphFolder, Kept
from torch_armllm.capture.export import CapturedGraph, CaptureError
from torch_armllm.hf.model_kind import ModelKind

_MOST_GRAPHS = 256
_MOST_WEIGHTS = 5_000_000
_NOT_READ = {"_name_or_path", "architectures", "bos_token_id", "eos_token_id", "quantization_config"}
"""Fields of a configuration that no forward of a base model reads; packed modules say how they are packed."""
_ERROR = re.compile(r"error=[^,]*")
_NOT_OF_GRAPHS = {"error", "name_or_path", "_is_hf_initialized"}
"""Attributes of modules that say where their weights come from, or what rounding them has cost."""


def _methods_of(kind: type) -> tuple[Any, ...]:
    """Returns the functions of a class, which a test may have replaced."""
    classes = [c for c in kind.__mro__ if c not in (nn.Module, object)]
    return tuple(f for c in classes for f in vars(c).values() if inspect.isfunction(f))


def _settings_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the attributes of a module that are plain values or functions, by name."""
    named = [(name, value) for name, value in sorted(vars(module).items()) if name not in _NOT_OF_GRAPHS]
    return tuple((name, value) for name, value in named if inspect.isfunction(value) or _described(value))


def _read_fields(config: Any) -> Any:
    """Returns a configuration, or a value in it, without fields that no forward reads."""
    if isinstance(config, dict):
        return {name: _read_fields(value) for name, value in config.items() if name not in _NOT_READ}
    return config


def _structure_of(kind: ModelKind) -> tuple[Any, ...]:
    """Returns what the graph of a model depends on, but for the values of its weights."""
    base, config = kind.base, kind.base.config
    modules = tuple(
        (
            name,
            type(m),
            _methods_of(type(m)),
            m.__dict__.get("forward"),
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            _ERROR.sub("", m.extra_repr()),
            _settings_of(m),
        )
        for name, m in base.named_modules()
    )
    tensors = tuple(
        (name, tuple(t.shape), t.dtype)
        for named in (base.named_parameters(), base.named_buffers())
        for name, t in named
    )
    fields = _read_fields(json.loads(config.to_json_string(use_diff=False)))
    written = json.dumps(fields), config._attn_implementation
    given = kind.attends_to_encoder, kind.token_input
    return modules, tensors, written, given, torch.get_default_dtype()


def _file_of(structure: tuple[Any, ...]) -> str | None:
    """Returns the name of the file of a structure; None if another process may have other functions by it."""
    described = _described(structure)
    return None if described is None else hashlib.sha256(described.encode()).hexdigest()


def _described(value: Any) -> str | None:
    """Returns a text that is equal for equal values in all processes; None if a value belongs to this one."""
    if isinstance(value, tuple):
        parts = [_described(each) for each in value]
        return None if None in parts else f"({','.join(map(str, parts))})"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if inspect.isfunction(value):
        code = value.__code__
        is_test = code.co_filename.startswith(f"{ROOT}/tests/")
        return None if is_test else f"{value.__module__}.{value.__qualname__}:{code.co_firstlineno}"
    is_plain = value is None or isinstance(value, (str, int, float, torch.dtype, torch.Size))
    return repr(value) if is_plain else None


def _named_tensors(base: nn.Module) -> dict[str, Tensor]:
    tensors = {name: t.detach() for name, t in base.named_buffers(remove_duplicate=False)}
    return {**tensors, **{name: t.detach() for name, t in base.named_parameters(remove_duplicate=False)}}


def _own_names(captured: CapturedGraph, base: nn.Module) -> dict[str, str]:
    """Returns the attributes of a graph that are weights, by name; markers hand on some as constants."""
    named = _named_tensors(base)
    by_place = {(t.data_ptr(), t.shape): name for name, t in named.items()}
    found = {}
    for attribute, value in captured.graph_module.named_buffers(recurse=False):
        name = captured.names.get(attribute, "")
        own = name if name in named else by_place.get((value.data_ptr(), value.shape))
        if own is not None:
            found[attribute] = own
    return found


def _copy(captured: CapturedGraph, weights: dict[str, Tensor]) -> CapturedGraph:
    """Returns a graph of its own modules and nodes, with the weights of the given attributes."""
    kept = captured.graph_module
    root: dict[str, Any] = {name: module for name, module in kept.named_children()}
    root.update(dict(kept.named_buffers(recurse=False)))
    root.update(weights)
    graph = fx.Graph()
    graph.output(graph.graph_copy(kept.graph, {}))
    return replace(captured, graph_module=fx.GraphModule(root, graph), names=dict(captured.names))


class KeptGraphs:
    """Answers for `capture`'s exports with a graph that was made before, if a model has the same structure.

    Args:
        exported: the function that exports a model.
        with_own_attention: the one that exports it in another way, after the first one's error.
        folder: graphs of other processes; None: there are none.
    """

    def __init__(
        self,
        exported: Callable[[ModelKind], CapturedGraph],
        with_own_attention: Callable[[ModelKind, CaptureError], CapturedGraph],
        folder: GraphFolder | None,
    ) -> None:
        self._exported = exported
        self._with_own_attention = with_own_attention
        self._folder = folder
        self._graphs: OrderedDict[Any, Kept | CaptureError] = OrderedDict()

    def exported(self, kind: ModelKind) -> CapturedGraph:
        """Returns the graph of a model; raises the error of its structure, also if another way serves it."""
        return self._kept(_structure_of(kind), kind.base, lambda: self._exported(kind))

    def with_own_attention(self, kind: ModelKind, reason: CaptureError) -> CapturedGraph:
        """Returns the graph of a model that the first way has refused or computed wrong."""
        key = _structure_of(kind)
        own_key = ("own attention", *key)
        captured = self._kept(own_key, kind.base, lambda: self._with_own_attention(kind, reason))
        self._keep(key, reason)
        return captured

    def _kept(self, key: Any, base: nn.Module, export: Callable[[], CapturedGraph]) -> CapturedGraph:
        kept = self._graphs.get(key) or self._load(key)
        if isinstance(kept, CaptureError):
            raise kept.with_traceback(None)
        if kept is not None:
            named = _named_tensors(base)
            return _copy(kept.captured, {attribute: named[name] for attribute, name in kept.own.items()})
        try:
            captured = export()
        except CaptureError as error:
            self._keep(key, CaptureError(str(error)))  # without the frames of its causes
            raise
        if sum(p.numel() for p in base.parameters()) < _MOST_WEIGHTS:
            own = _own_names(captured, base)
            self._keep(key, Kept(_copy(captured, dict.fromkeys(own, torch.empty(0))), own))
        return captured

    def _load(self, key: Any) -> Kept | CaptureError | None:
        """Returns what another process has kept."""
        name = _file_of(key) if self._folder else None
        found = self._folder.load(name) if self._folder and name else None
        if found is not None:
            self._remember(key, found)
        return found

    def _keep(self, key: Any, kept: Kept | CaptureError) -> None:
        if key in self._graphs:
            return
        self._remember(key, kept)
        name = _file_of(key) if self._folder else None
        if self._folder and name:
            self._folder.store(name, kept)

    def _remember(self, key: Any, kept: Kept | CaptureError) -> None:
        self._graphs[key] = kept
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
