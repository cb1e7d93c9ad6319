"""Loading of a model, its tokenizer and an engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.images.build import takes_media
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.dtypes import kv_cache_dtype_name
from torch_armllm.kv_cache.shapes import StatesOnlyShape
from torch_armllm.llm.calls.foreign_settings import check_names
from torch_armllm.patching.state import is_patched, patch_state, patched_forward
from torch_armllm.pooling.pooling_engine import PoolingEngine
from torch_armllm.system.default_dtype import Float32ByDefault
from torch_armllm.system.logs import show_messages

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from torch_armllm.lora.slots import AdapterSlots


logger = logging.getLogger(__name__)


class LoadedEngine(NamedTuple):
    """An engine with its tokenizer and its model: a patched model or a `PlanModel`."""

    engine: LLMEngine
    model: Any
    tokenizer: PreTrainedTokenizerBase | None


@Float32ByDefault()
def load_engine(request: ModelRequest, config: EngineConfig | None = None) -> LoadedEngine:
    """Loads a model and its tokenizer, patches the model if needed, and builds an engine.

    Args:
        request: what to load; see `ModelRequest.resolved` for ``quantization="auto"``.
        config: of the engine.

    Raises:
        ValueError: a setting is unknown, or does not fit the model or the memory.
        OSError: the checkpoint is not found.
    """
    config = config or EngineConfig()
    request = request.resolved()
    own_tokenizer = None if request.skip_tokenizer_init else _tokenizer(request)
    loaded = load_patched(request, config.kv_cache_dtype, adapter_slots_of(config))
    if config.speculative_config == "auto" and isinstance(request.model, str):
        _suggest_drafts(loaded, Path(request.model).expanduser())
    kind = patch_state(loaded).kind
    processor = load_processor(kind, request.source) if any(config.media_limits.values()) else None
    return LoadedEngine(build_engine(loaded, own_tokenizer, config, processor), loaded, own_tokenizer)


def load_processor(kind: ModelKind, source: str) -> Any:
    """Returns the processor of a model that takes images, videos or sounds; None if it cannot be loaded."""
    if not source or not takes_media(kind):
        return None
    from torch_armllm.checkpoint import load  # imports transformers

    try:
        return load.load_processor(source)
    except (OSError, ValueError, ImportError) as error:
        logger.warning("%s is served for text only, as its processor cannot be loaded: %s", source, error)
        return None


@Float32ByDefault()
def load_pooling_engine(
    request: ModelRequest, config: EngineConfig, pooler_config: Mapping[str, Any] | None
) -> tuple[PoolingEngine, Any, PreTrainedTokenizerBase | None]:
    """Loads a pooling model and its tokenizer, patches the model if needed, and builds its engine.

    Args:
        request: what to load.
        config: of the engine.
        pooler_config: see `torch_armllm.pooling.loading.load_pooling`.

    Raises:
        ValueError: the model cannot pool, or a setting or a file does not fit it.
        OSError: the checkpoint is not found.
    """
    from torch_armllm.pooling.loading import load_pooling  # imports transformers

    show_messages()
    loaded = load_pooling(request, pooler_config)
    return PoolingEngine(loaded, config), loaded.model.kind.model, loaded.tokenizer


def load_patched(
    request: ModelRequest, kv_cache_dtype: str, adapter_slots: AdapterSlots | None = None
) -> PreTrainedModel:
    """Loads and patches the model of `load_engine`, with slots for adapters if their sizes are given."""
    # these import transformers, which an engine from the plan cache does not need
    from torch_armllm.checkpoint.load import load_model
    from torch_armllm.patching.patch import patch, patch_with_slots
    from torch_armllm.quant.inspection import is_packed
    from torch_armllm.quant.recipe import Recipe
    from torch_armllm.quant.schemes.registry import DEFAULT

    request.check_overrides()
    cache = None if kv_cache_dtype == "auto" else kv_cache_dtype
    quantization = request.quantization
    recipe = None if quantization is None else Recipe.of(quantization)
    if isinstance(request.model, str):
        how = request.dtype, request.progress, cache, recipe
        model = load_model(request.model, *how, hf_overrides=request.hf_overrides)
    else:
        model = request.model
    if not is_patched(model):
        if recipe is not None and not is_packed(model):
            show_messages()
            scheme = "int4" if recipe.scheme == DEFAULT else recipe.scheme
            logger.info("quantizing the weights to %s; quantization=None keeps them as they are", scheme)
        # the name, not its recipe: packed weights of another tool stay what they are only for the default
        chosen = quantization if isinstance(quantization, str) else recipe
        if adapter_slots is not None and recipe is not None and recipe.importance is None:
            chosen = replace(recipe, importance=False)  # adapters do not know scaled channels
        patch(model, chosen, progress=request.progress, kv_cache_dtype=cache, adapter_slots=adapter_slots)
    elif adapter_slots is not None:  # each engine has slots, and a plan that reads them, of its own
        patch_with_slots(model, cache, adapter_slots)
    _check_cache(model, cache)
    return model


def adapter_slots_of(config: EngineConfig) -> AdapterSlots | None:
    """Returns the sizes of the slots for adapters; None: there are to be none."""
    if not config.enable_lora:
        return None
    from torch_armllm.lora.slots import AdapterSlots  # imports modules that other engines do not need

    # a step may verify draft tokens beyond its budget of tokens
    rows = 2 * max(config.max_num_batched_tokens, config.max_num_seqs)
    processes = config.tensor_ranks, config.pipeline_parallel_size
    return AdapterSlots(config.max_loras, config.max_lora_rank, rows, config.lora_dtype, *processes)


def verify_checksums(model: str | PreTrainedModel) -> None:
    """Compares the tensors of a saved folder with their checksums.

    Raises:
        ValueError: a tensor has changed, the folder has no checksums, or the model is loaded already.
    """
    from torch_armllm.checkpoint.load import verify_source  # imports transformers

    if not isinstance(model, str):
        raise ValueError("verify is for a model that is yet to be loaded: give its folder")
    verify_source(model)


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Builds an `EngineConfig` from settings by name.

    Raises:
        ValueError: a setting is unknown, or one of vLLM's that makes no sense here.
    """
    check_names(settings, (field.name for field in fields(EngineConfig)))
    return EngineConfig(**settings)


def default_sampling_params(generation: GenerationConfig | None) -> SamplingParams:
    """Returns the sampling parameters that a generation config recommends."""
    recommended = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := getattr(generation, name, None)) is not None
    }
    if (most := getattr(generation, "max_new_tokens", None)) is not None:
        recommended["max_tokens"] = most
    return SamplingParams(**recommended)


def _suggest_drafts(model: PreTrainedModel, folder: Path) -> None:
    """Says in the log that a checkpoint carries a draft layer which is not used."""
    from torch_armllm.engine.speculative.mtp import carries_layer  # imports transformers

    if carries_layer(folder, model.config.get_text_config().num_hidden_layers):
        logger.info(
            "%s carries a layer for multi-token prediction, which is not used; speculative_config="
            '{"method": "mtp", "num_speculative_tokens": 2} drafts with it',
            folder,
        )


def _check_cache(model: PreTrainedModel, cache: str | None) -> None:
    forward = patched_forward(model)
    if cache is None or forward is None or isinstance(forward.shape, StatesOnlyShape):
        return
    own = kv_cache_dtype_name(forward.shape.dtype)
    if own != cache:
        raise ValueError(
            f"kv_cache_dtype is {cache!r}, but this model was patched for {own} caches: "
            f"patch it with kv_cache_dtype={cache!r}"
        )


def _tokenizer(request: ModelRequest) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    from torch_armllm.checkpoint.load import load_tokenizer  # imports transformers

    if isinstance(request.tokenizer, str):
        return load_tokenizer(request.tokenizer)
    if request.tokenizer is not None:
        return request.tokenizer
    if isinstance(request.model, str):
        return load_tokenizer(request.model)
    if not request.source:
        return None
    try:
        return AutoTokenizer.from_pretrained(request.source, trust_remote_code=False)
    except (OSError, ValueError):  # such as a model that was created from a configuration
        return None
