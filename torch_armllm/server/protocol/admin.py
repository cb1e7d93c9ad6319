"""What a model is loaded by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from torch_armllm.kv_cache.dtypes import KvCacheDtype
from torch_armllm.server.protocol.body import Part

_ENGINE = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "kv_cache_dtype",
    "threads",
)


class LoadRequest(Part):
    """A model that is to be served; what is not said is as the server was started with.

    Attributes:
        model: smollm2, a folder of the server's machine or a hub name.
        name: as clients will ask for it; none: as `model`.
        quantization: ``int4``, another scheme, or ``none``.
        chat_template: instead of the tokenizer's own.
        tool_call_parser: None: told by the chat template.
        kv_cache_memory: bytes, or a part of what is free.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1, max_length=200)
    dtype: str | None = None
    quantization: str | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    kv_cache_memory: int | float | None = Field(default=None, gt=0)
    kv_cache_dtype: KvCacheDtype | None = None
    threads: int | None = Field(default=None, ge=1)
    chat_template: str | None = None
    tool_call_parser: Literal["hermes", "llama", "mistral"] | None = None

    def engine(self) -> dict[str, Any]:
        """Arguments of `torch_armllm.LLM` that are said."""
        said = {name: value for name in _ENGINE if (value := getattr(self, name)) is not None}
        if self.quantization is not None:
            said["quantization"] = None if self.quantization == "none" else self.quantization
        return said
