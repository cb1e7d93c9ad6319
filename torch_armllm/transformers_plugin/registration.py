"""Registers the quantizer with transformers, once transformers is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_armllm.hf.names import METHOD
from torch_armllm.transformers_plugin.torchao_messages import torchao_messages_hidden

_REGISTRY = "transformers.quantizers.auto"


def when_transformers_is_there() -> None:
    """Registers now, or when transformers' registry is imported: importing it here would take seconds."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None and _is_complete(registry):
        _register(registry)
    elif not any(isinstance(finder, (_Watch, _AfterRegistry)) for finder in sys.meta_path):
        # a registry that is incomplete imports torch, which imports this package
        sys.meta_path.insert(0, _Watch() if registry is None else _AfterRegistry(registry))


def _is_complete(registry: ModuleType) -> bool:
    """True if transformers' registry has been executed to its end."""
    return hasattr(registry, "register_quantizer")


def _register(registry: ModuleType) -> None:
    if METHOD in registry.AUTO_QUANTIZER_MAPPING:
        return
    from torch_armllm.quant.config import ArmInt4Config
    from torch_armllm.transformers_plugin.quantizer import ArmInt4Quantizer

    registry.register_quantization_config(METHOD)(ArmInt4Config)
    registry.register_quantizer(METHOD)(ArmInt4Quantizer)
    _explain_refusal(registry.AutoHfQuantizer, ArmInt4Config)


def _explain_refusal(quantizers: Any, own: type) -> None:
    """Makes transformers' refusal of our config for a third-party checkpoint name the remedy."""
    merge = quantizers.merge_quantization_configs

    def explained(stored: Any, given: Any = None) -> Any:
        settings = stored if isinstance(stored, dict) else stored.to_dict()
        method = settings.get("quant_method")
        if isinstance(given, own) and method is not None and method != METHOD:
            raise ValueError(
                f"this checkpoint is quantized by {getattr(method, 'value', method)} already, and "
                "from_pretrained would leave it so: torch_armllm.load(folder) reads its integers "
                "as they are, torch_armllm.load(folder, requantize=True) quantizes it anew"
            )
        return merge(stored, given)

    quantizers.merge_quantization_configs = staticmethod(explained)


class _Watch(MetaPathFinder):
    """A one-time import hook: finds transformers' registry and registers after its module is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _AfterRegistry(MetaPathFinder):
    """A one-time import hook: registers at the first import after the registry's own has ended."""

    def __init__(self, registry: ModuleType) -> None:
        self._registry = registry

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _is_complete(self._registry):
            sys.meta_path.remove(self)
            _register(self._registry)
        return None


class _Registering(Loader):
    """A loader that registers the quantizer after the module is executed."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with torchao_messages_hidden():
            self._loader.exec_module(module)
        _register(module)
