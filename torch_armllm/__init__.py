"""Fast language models on Arm CPUs: one call quantizes a transformers model and fuses its ops."""

from __future__ import annotations

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "ArmInt4Config",
    "AsyncLLM",
    "BatchUpdate",
    "BeamSearchParams",
    "LoRARequest",
    "LogitsProcessor",
    "MoveDirectionality",
    "PoolingParams",
    "Recipe",
    "Report",
    "RequestOutput",
    "SamplingParams",
    "Transcriber",
    "is_patched",
    "load",
    "patch",
    "quantize",
    "tune_scales",
    "unpatch",
]

# In a checkout, `ops` and `passes` are next to this package; an installed package contains them.
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "ops" / "schemas.cpp").exists():
    __path__.append(str(_checkout))

from torch_armllm._version import __version__ as __version__  # noqa: E402
from torch_armllm.transformers_plugin.registration import (  # noqa: E402
    when_transformers_is_there as _when_transformers_is_there,
)

_when_transformers_is_there()

if TYPE_CHECKING:
    from torch_armllm.checkpoint.load import load
    from torch_armllm.engine.outputs import RequestOutput
    from torch_armllm.engine.sampling.batch_processors import (
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
    )
    from torch_armllm.engine.sampling.custom_processors import AdapterLogitsProcessor
    from torch_armllm.engine.sampling_params import SamplingParams
    from torch_armllm.llm.async_llm import AsyncLLM
    from torch_armllm.llm.beam_search import BeamSearchParams
    from torch_armllm.llm.llm import LLM
    from torch_armllm.lora.request import LoRARequest
    from torch_armllm.patching.patch import patch, unpatch
    from torch_armllm.patching.state import is_patched
    from torch_armllm.pooling.pooling_params import PoolingParams
    from torch_armllm.quant.config import ArmInt4Config
    from torch_armllm.quant.inplace import quantize
    from torch_armllm.quant.recipe import Recipe
    from torch_armllm.quant.report import Report
    from torch_armllm.quant.scale_tuning import tune_scales
    from torch_armllm.speech.transcriber import Transcriber

_MODULES = {
    "patch": "torch_armllm.patching.patch",
    "unpatch": "torch_armllm.patching.patch",
    "is_patched": "torch_armllm.patching.state",
    "quantize": "torch_armllm.quant.inplace",
    "tune_scales": "torch_armllm.quant.scale_tuning",
    "load": "torch_armllm.checkpoint.load",
    "ArmInt4Config": "torch_armllm.quant.config",
    "Recipe": "torch_armllm.quant.recipe",
    "Report": "torch_armllm.quant.report",
    "LLM": "torch_armllm.llm.llm",
    "BeamSearchParams": "torch_armllm.llm.beam_search",
    "AsyncLLM": "torch_armllm.llm.async_llm",
    "AdapterLogitsProcessor": "torch_armllm.engine.sampling.custom_processors",
    "LogitsProcessor": "torch_armllm.engine.sampling.batch_processors",
    "BatchUpdate": "torch_armllm.engine.sampling.batch_processors",
    "MoveDirectionality": "torch_armllm.engine.sampling.batch_processors",
    "LoRARequest": "torch_armllm.lora.request",
    "SamplingParams": "torch_armllm.engine.sampling_params",
    "PoolingParams": "torch_armllm.pooling.pooling_params",
    "RequestOutput": "torch_armllm.engine.outputs",
    "Transcriber": "torch_armllm.speech.transcriber",
}


def __getattr__(name: str) -> Any:
    # imported at first use: transformers takes seconds to import
    if name in _MODULES:
        import importlib

        from torch_armllm.system.gc_pause import collection_paused

        with collection_paused():
            return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
