"""Request schema of `/v1/admin/models`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.text.reasoning_tags import parser_of
from torch_armllm.kv_cache.dtype_names import KvCacheDtype, StateDtype
from torch_armllm.server.protocol.body import RequestPart
from torch_armllm.system.dtypes import full_dtype_name
from torch_armllm.system.settings import setting_named

_ENGINE_FIELDS = (
    "dtype",
    "runner",
    "pooler_config",
    "hf_overrides",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_memory",
    "kv_cache_memory",
    "kv_cache_dtype",
    "state_dtype",
    "threads",
)
_FULL_NAME = BeforeValidator(lambda name: full_dtype_name(name) if isinstance(name, str) else name)


def _count(name: str) -> Any:
    """Returns the field of a setting of the engine that is a number."""
    return Field(default=None, ge=1, le=setting_named(EngineConfig, name).kind.most)


def _known_parser(name: str | None) -> str | None:
    if name is not None and name not in TOOL_PARSERS:
        raise ValueError(f"is {name[:50]!r}; give {', '.join(TOOL_PARSERS)}")
    return name


class LoadRequest(RequestPart):
    """A request to load and serve a model; fields that are left out default to the server's own options.

    Attributes:
        model: smollm2, a folder on the server's machine, or a Hugging Face Hub name.
        name: the model's name in requests; None: the value of `model`.
        quantization: ``int4``, another scheme, ``none`` or ``auto``.
        runner: ``generate`` or ``pooling``; ``auto``: what the model's files say.
        pooler_config: ``pooling_type`` and ``normalize`` of a pooling model, instead of what its files say.
        hf_overrides: fields to replace in config.json.
        chat_template: replaces the tokenizer's own template.
        tool_call_parser: name of the format of tool calls; None: derived from the chat template.
        reasoning_parser: name of the reasoning parser; None: detected from the chat template and the tokens.
        max_memory: bytes for weights and KV cache, or a fraction of the free memory.
        kv_cache_memory: bytes, or a fraction of the free memory.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=4096)
    name: str | None = Field(default=None, min_length=1, max_length=200)
    dtype: str | None = Field(default=None, max_length=32)
    quantization: str | None = Field(default=None, max_length=32)
    runner: Literal["auto", "generate", "pooling"] | None = None
    pooler_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None
    max_model_len: int | None = _count("max_model_len")
    max_num_seqs: int | None = _count("max_num_seqs")
    max_num_batched_tokens: int | None = _count("max_num_batched_tokens")
    max_memory: int | float | None = Field(default=None, gt=0, le=1 << 50)
    kv_cache_memory: int | float | None = Field(default=None, gt=0, le=1 << 50)
    kv_cache_dtype: Annotated[KvCacheDtype | None, _FULL_NAME] = None
    state_dtype: Annotated[StateDtype | None, _FULL_NAME] = None
    threads: int | None = _count("threads")
    chat_template: str | None = Field(default=None, max_length=1 << 20)
    tool_call_parser: Annotated[str | None, AfterValidator(_known_parser)] = None
    reasoning_parser: Annotated[str | None, AfterValidator(parser_of)] = None

    def engine_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `torch_armllm.LLM` that the request sets."""
        arguments = {name: value for name in _ENGINE_FIELDS if (value := getattr(self, name)) is not None}
        if self.quantization is not None:
            arguments["quantization"] = None if self.quantization == "none" else self.quantization
        return arguments
