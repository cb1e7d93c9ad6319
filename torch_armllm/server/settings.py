"""Operator-facing settings of the server and of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_armllm.engine.text.content_format import ContentFormat


@dataclass(frozen=True)
class ModelSettings:
    """Settings of one served model.

    Attributes:
        name: the model's name in requests.
        source: the checkpoint to load; see `torch_armllm.LLM`.
        engine: further arguments of `torch_armllm.LLM`.
        chat_template: replaces the tokenizer's own template.
        tool_parser: a name of `TOOL_PARSERS`; None: derived from the chat template.
        reasoning_parser: one of `PARSER_NAMES`; None: detected from the chat template
            and the tokens.
        adapters: folders of LoRA adapters by their names in requests.
        content_format: form of the contents that the template reads: ``string``, ``openai`` or ``auto``.
    """

    name: str
    source: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    content_format: ContentFormat = "auto"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        api_keys: accepted API keys; if empty, no key is required.
        admin_api_key: key of the admin routes, which are off without one.
        max_request_bytes: largest request body.
        max_audio_bytes: largest request body with audio.
        max_queue: sequences that may wait, in addition to those that run.
        max_requests_per_key: sequences of one API key that run or wait; None: no limit.
        max_tokens_per_minute: prompt and output tokens of one API key; None: no limit.
        max_tokens: upper limit of every request's output tokens; None: the model's own limit.
        request_timeout: seconds that a request may take.
        read_timeout: seconds within which a request must arrive, and for which an idle connection is kept.
        write_timeout: seconds for which sent data may stay unacknowledged by the client.
        restart: rebuilds an engine that has failed.
        max_restarts: restarts within ``restart_window``; after them a failed engine stays dead.
        restart_window: seconds.
        drain_timeout: seconds that running requests have to finish when the server shuts down.
        allowed_origins: origins of web pages that may call the server (CORS); if empty, only its own.
        allowed_hosts: names that the header ``Host`` may have, beside those of this machine; if empty, only
            a server on a loopback address that needs no key checks it.
        host: name or address on which the server listens, which ``Host`` may have too.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    max_request_bytes: int = 8 << 20
    max_audio_bytes: int = 25 << 20
    max_queue: int = 256
    max_requests_per_key: int | None = None
    max_tokens_per_minute: int | None = None
    max_tokens: int | None = None
    request_timeout: float = 600.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    restart: bool = False
    max_restarts: int = 3
    restart_window: float = 600.0
    drain_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    host: str = ""
