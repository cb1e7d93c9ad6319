"""Fast language models on Arm CPUs: one call quantises a transformers model and fuses its ops."""

from __future__ import annotations

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ArmInt4Config",
    "AsyncLLM",
    "Report",
    "RequestOutput",
    "SamplingParams",
    "is_patched",
    "load",
    "patch",
    "quantize",
    "unpatch",
]

# In a checkout, `ops` and `passes` lie beside this package; an installed package holds them itself.
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "ops" / "library.cpp").exists():
    __path__.append(str(_checkout))

from torch_armllm.hf.registration import when_transformers_is_there as _when_transformers_is_there  # noqa: E402

_when_transformers_is_there()

if TYPE_CHECKING:
    from torch_armllm.async_llm import AsyncLLM
    from torch_armllm.checkpoint import load
    from torch_armllm.engine.outputs import RequestOutput
    from torch_armllm.engine.sampling_params import SamplingParams
    from torch_armllm.hf.config import ArmInt4Config
    from torch_armllm.llm import LLM
    from torch_armllm.patch_state import is_patched
    from torch_armllm.patching import patch, unpatch
    from torch_armllm.quant import quantize
    from torch_armllm.report import Report

_HOMES = {
    "patch": "torch_armllm.patching",
    "unpatch": "torch_armllm.patching",
    "is_patched": "torch_armllm.patch_state",
    "quantize": "torch_armllm.quant",
    "load": "torch_armllm.checkpoint",
    "ArmInt4Config": "torch_armllm.hf.config",
    "Report": "torch_armllm.report",
    "LLM": "torch_armllm.llm",
    "AsyncLLM": "torch_armllm.async_llm",
    "SamplingParams": "torch_armllm.engine.sampling_params",
    "RequestOutput": "torch_armllm.engine.outputs",
}


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import: only those who ask for a model pay for it
    if name in _HOMES:
        import importlib

        from torch_armllm.garbage import collection_paused

        with collection_paused():
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
