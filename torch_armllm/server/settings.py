"""What whoever runs the server decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelSettings:
    """Settings of one of a server's models.

    Attributes:
        name: as clients ask for it.
        source: what it is loaded from; see `torch_armllm.LLM`.
        engine: further arguments of `torch_armllm.LLM`.
        chat_template: instead of the tokenizer's own.
        tool_parser: ``hermes``, ``llama``, ``mistral``, or None: told by the chat template.
    """

    name: str
    source: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    tool_parser: str | None = None


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        api_keys: any of these opens all routes; none: nothing is asked for.
        max_request_bytes: of a request's body.
        max_queue: answers that may wait for their turn, beside those that run.
        max_tokens: most tokens of an answer, whatever a client asks for; None: what the model allows.
        request_timeout: seconds that an answer may take.
        read_timeout: seconds within which a request must have arrived, and that a silent connection lasts.
        write_timeout: seconds for which a client may leave unread what was sent.
        drain_timeout: seconds that running requests have when the server is asked to end.
        allowed_origins: of pages in browsers (CORS); none: of no others.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_request_bytes: int = 8 << 20
    max_queue: int = 256
    max_tokens: int | None = None
    request_timeout: float = 600.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    drain_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
