"""Operator-facing settings of the server and of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.engine.text.content_format import CONTENT_FORMATS, ContentFormat
from torch_armllm.engine.text.reasoning_tags import PARSER_NAMES
from torch_armllm.system.settings import (
    COUNT,
    FLAG,
    INPUT_FILE,
    PORT,
    SECONDS,
    TEXT,
    TEXTS,
    choice,
    described,
    setting,
)

API_KEY_VARIABLE = "ARMLLM_API_KEY"
ADMIN_KEY_VARIABLE = "ARMLLM_ADMIN_API_KEY"


@described
@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server."""

    host: str = setting("", TEXT, "address to listen at; 0.0.0.0 accepts other machines, too")
    port: int = setting(8000, PORT, "TCP port to listen at; 0: any free port")
    api_keys: tuple[str, ...] = setting(
        (),
        replace(TEXTS, shown="KEY"),
        "require this key",
        "If there is none, no key is required.",
        none=f"the environment variable {API_KEY_VARIABLE}",
        option="--api-key",
        secret=True,
    )
    admin_api_key: str | None = setting(
        None,
        replace(TEXT, shown="KEY"),
        "key of the routes that load and unload models, which are off without one",
        none=f"the environment variable {ADMIN_KEY_VARIABLE}",
        secret=True,
    )
    max_request_bytes: int = setting(8 << 20, COUNT, "maximum number of bytes of a request body")
    max_audio_bytes: int = setting(25 << 20, COUNT, "maximum number of bytes of a request body with audio")
    max_queue: int = setting(
        256, COUNT, "maximum number of waiting sequences", "They are in addition to those that run."
    )
    max_requests_per_key: int | None = setting(
        None, COUNT, "maximum number of sequences of one API key, running and waiting", none="no limit"
    )
    max_tokens_per_minute: int | None = setting(
        None, COUNT, "maximum number of prompt and output tokens of one API key in a minute", none="no limit"
    )
    max_tokens: int | None = setting(
        None, COUNT, "upper limit of max_tokens of every request", none="no limit"
    )
    request_timeout: float = setting(600.0, SECONDS, "seconds in which a request must finish")
    read_timeout: float = setting(
        30.0,
        SECONDS,
        "seconds in which a request must arrive completely",
        "An idle connection is kept as long.",
    )
    write_timeout: float = setting(60.0, SECONDS, "seconds in which a client must read what was sent")
    drain_timeout: float = setting(60.0, SECONDS, "seconds in which running requests must finish at shutdown")
    restart: bool = setting(False, FLAG, "rebuild an engine that has failed, instead of leaving it dead")
    max_restarts: int = setting(3, COUNT, "maximum number of restarts in 10 minutes")
    restart_window: float = setting(600.0, SECONDS, "seconds in which restarts are counted", option=None)
    allowed_origins: tuple[str, ...] = setting(
        (),
        replace(TEXTS, shown="URL"),
        "origin of web pages that may use the API (CORS)",
        option="--allowed-origin",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        replace(TEXTS, shown="NAME"),
        "name that the header Host of requests may have, beside this machine's own; *.NAME for all below it, "
        "* for any",
        none="checked on loopback addresses without keys only",
    )


@described
@dataclass(frozen=True)
class ModelSettings:
    """Settings of one served model.

    Attributes:
        name: the model's name in requests.
        source: the checkpoint to load; see `torch_armllm.LLM`.
        engine: further arguments of `torch_armllm.LLM`.
        adapters: folders of LoRA adapters by their names in requests.
    """

    name: str
    source: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = setting(None, INPUT_FILE, "a template", none="the tokenizer's own")
    content_format: ContentFormat = setting(
        "auto",
        choice(CONTENT_FORMATS),
        "contents of messages as templates read them: string, a text; openai, a list of parts; auto: found "
        "by rendering it",
        option="--chat-template-content-format",
    )
    tool_parser: str | None = setting(
        None,
        choice(tuple(TOOL_PARSERS)),
        "format of tool calls, by vLLM's names",
        none="derived from the chat template",
        option="--tool-call-parser",
    )
    reasoning_parser: str | None = setting(
        None,
        choice(PARSER_NAMES),
        "format by which reasoning is parted from answers, by vLLM's names",
        none="detected from the chat template and the tokens",
    )
    adapters: Mapping[str, str] = field(default_factory=dict)
