"""Settings of how `LLM` loads a model, beside those of its engine; this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch_armllm.engine.settings.engine_settings import EngineSettings
from torch_armllm.system.settings import FLAG, OBJECT, SIZE, SWITCH, TEXT, Kind, choice, described, setting

if TYPE_CHECKING:
    import torch

    from torch_armllm.quant.recipe import Recipe

Runner = Literal["auto", "generate", "pooling"]


@described
@dataclass(frozen=True)
class LoadSettings:
    """Settings of loading."""

    dtype: str | torch.dtype = setting(
        "auto",
        choice(("auto", "bfloat16", "float16", "float32"), kind="dtype"),
        "data type of the weights; bf16, fp16 and fp32 are accepted, too; auto: the checkpoint's own",
    )
    quantization: str | Recipe | None = setting(
        "auto",
        Kind("scheme"),
        "int4, another scheme, or none to keep the weights as they are; auto: int4, but smollm2 keeps the "
        "integers of its 4-bit file",
        "A `Recipe` says more.",
    )
    revision: str | None = setting(
        None,
        replace(TEXT, shown="NAME"),
        "branch, tag or commit of a model on the hub",
        none="the default branch",
    )
    hf_overrides: Mapping[str, Any] | None = setting(
        None,
        OBJECT,
        'fields to replace in config.json, such as `{"max_position_embeddings": 65536}`',
        none="none",
    )
    verify: bool = setting(
        False,
        FLAG,
        "compare every tensor of a saved folder with its checksum before it is loaded",
        "This reads all of it.",
    )
    skip_tokenizer_init: bool = setting(
        False, SWITCH, "runs without a tokenizer: prompts and outputs are token ids", option=None
    )
    progress: bool = setting(
        True, SWITCH, "shows progress bars while the model is loaded and quantized", option=None
    )
    trust_remote_code: bool = setting(
        False, SWITCH, "True is refused, as code of a checkpoint is never run", option=None
    )
    kv_cache_memory_bytes: int | None = setting(
        None, SIZE, "vLLM's name of `kv_cache_memory`", none="not given", option=None
    )


@described
@dataclass(frozen=True)
class PoolingSettings:
    """Settings of models that pool."""

    runner: Runner = setting(
        "auto",
        choice(get_args(Runner)),
        "auto: what a model's files say; pooling: a language model makes vectors",
        "A class that does not generate, or a pooling module of sentence-transformers, pools.",
    )
    pooler_config: Mapping[str, Any] | None = setting(
        None,
        OBJECT,
        '`{"pooling_type": "LAST, CLS, MEAN or MAX", "normalize": true}`',
        none="what the files say",
    )


class LLMSettings(EngineSettings, total=False):
    """Keywords of `LLM`: its settings of loading and pooling, and those of its engine."""

    dtype: str | torch.dtype
    quantization: str | Recipe | None
    revision: str | None
    hf_overrides: Mapping[str, Any] | None
    verify: bool
    skip_tokenizer_init: bool
    progress: bool
    trust_remote_code: bool
    kv_cache_memory_bytes: int | None
    runner: Runner
    pooler_config: Mapping[str, Any] | None


def split_settings(given: Mapping[str, Any]) -> tuple[LoadSettings, PoolingSettings, dict[str, Any]]:
    """Returns the settings of loading, those of pooling, and what is left for the engine."""
    left = dict(given)
    loading, pooling = (
        {each.name: left.pop(each.name) for each in fields(owner) if each.name in left}
        for owner in (LoadSettings, PoolingSettings)
    )
    return LoadSettings(**loading), PoolingSettings(**pooling), left
