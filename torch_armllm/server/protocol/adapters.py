"""Request schemas of the routes that load and unload adapters."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from torch_armllm.server.protocol.body import RequestPart


class LoadAdapterRequest(RequestPart):
    """A request to serve an adapter; names are vLLM's.

    Attributes:
        lora_name: the adapter's name in requests.
        lora_path: folder on the server's machine, in PEFT's format.
        base_model: the served model that it adapts; None: the first.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)
    base_model: str | None = Field(default=None, max_length=200)


class UnloadAdapterRequest(RequestPart):
    """A request to serve an adapter no longer.

    Attributes:
        lora_name: the adapter's name in requests.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1, max_length=200)
