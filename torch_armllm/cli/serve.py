"""The command ``torch-armllm serve``."""

from __future__ import annotations

import argparse
import errno
import os
import socket
from typing import TYPE_CHECKING

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli import option_types as types
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments
from torch_armllm.cli.parser import Parser
from torch_armllm.engine.text.reasoning_tags import PARSER_NAMES
from torch_armllm.system.extras import require_extra
from torch_armllm.system.gc_pause import collection_paused

if TYPE_CHECKING:  # imports transformers
    from torch_armllm.speech.transcriber import Transcriber

_KEY_VARIABLE = "ARMLLM_API_KEY"
_ADMIN_KEY_VARIABLE = "ARMLLM_ADMIN_API_KEY"


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "serve",
        "serve models through an OpenAI-compatible API",
        "torch-armllm serve MODEL --port 8000 --api-key KEY",
        "torch-armllm serve A B --served-model-name a --served-model-name b",
        "torch-armllm serve MODEL --host 0.0.0.0 --max-num-seqs 32 --kv-cache-dtype int8",
    )
    parser.add_argument(
        "model", nargs="*", default=["smollm2"], help="smollm2, smollm2-moe, a folder or a hub name"
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 accepts other machines, too"
    )
    group.add_argument(
        "--port", type=types.port, default=8000, help="TCP port to listen at; 0: any free port"
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model in the API, once per model (default: the model argument)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"require this key; repeatable (default: the environment variable {_KEY_VARIABLE})",
    )
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help="key of the routes that load and unload models, which are off without one (default: the "
        f"environment variable {_ADMIN_KEY_VARIABLE})",
    )
    group.add_argument(
        "--max-request-bytes",
        type=types.positive,
        default=8 << 20,
        metavar="N",
        help="maximum number of bytes of a request body",
    )
    group.add_argument(
        "--max-audio-bytes",
        type=types.positive,
        default=25 << 20,
        metavar="N",
        help="maximum number of bytes of a request body with audio",
    )
    group.add_argument(
        "--max-queue",
        type=types.positive,
        default=256,
        metavar="N",
        help="maximum number of waiting sequences",
    )
    group.add_argument(
        "--max-requests-per-key",
        type=types.positive,
        metavar="N",
        help="maximum number of sequences of one API key, running and waiting (default: no limit)",
    )
    group.add_argument(
        "--max-tokens-per-minute",
        type=types.positive,
        metavar="N",
        help="maximum number of prompt and output tokens of one API key in a minute (default: no limit)",
    )
    group.add_argument(
        "--max-tokens",
        type=types.positive,
        metavar="N",
        help="upper limit of max_tokens of every request (default: no limit)",
    )
    for name, time, text in (
        ("request", 600.0, "in which a request must finish"),
        ("read", 30.0, "in which a request must arrive completely"),
        ("write", 60.0, "in which a client must read what was sent"),
        ("drain", 60.0, "in which running requests must finish at shutdown"),
    ):
        group.add_argument(
            f"--{name}-timeout", type=types.seconds, default=time, metavar="SECONDS", help=f"seconds {text}"
        )
    group.add_argument(
        "--restart", action="store_true", help="rebuild an engine that has failed, instead of leaving it dead"
    )
    group.add_argument(
        "--max-restarts",
        type=types.positive,
        default=3,
        metavar="N",
        help="maximum number of restarts in 10 minutes",
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        metavar="URL",
        help="origin of web pages that may use the API (CORS); repeatable (default: none)",
    )
    group.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="NAME",
        help="name that the header Host of requests may have, beside this machine's own; *.NAME for all "
        "below it, * for any; repeatable (default: checked on loopback addresses without keys only)",
    )
    group.add_argument(
        "--chat-template",
        type=types.input_file,
        metavar="FILE",
        help="a template (default: the tokenizer's own)",
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=["auto", "string", "openai"],
        default="auto",
        help="contents of messages as templates read them: string, a text; openai, a list of parts; auto: "
        "found by rendering it",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=list(TOOL_PARSERS),
        help="format of tool calls, by vLLM's names (default: derived from the chat template)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=list(PARSER_NAMES),
        help="format by which reasoning is parted from answers, by vLLM's names (default: detected from the "
        "chat template and the tokens)",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="serve the model with these LoRA adapters, too; needs --enable-lora",
    )
    add_engine_options(parser)
    _add_pooling_options(parser)
    parser.set_defaults(run=run)
    return parser


def _add_pooling_options(parser: Parser) -> None:
    group = parser.add_argument_group("pooling models")
    group.add_argument(
        "--runner",
        choices=["auto", "generate", "pooling"],
        default="auto",
        help="auto: what a model's files say; pooling: a language model makes vectors",
    )
    group.add_argument(
        "--pooler-config",
        type=types.json_object,
        metavar="JSON",
        help='{"pooling_type": "LAST, CLS, MEAN or MAX", "normalize": true} (default: what the files say)',
    )


def run(options: argparse.Namespace) -> None:
    """Loads the models and serves them until a signal arrives."""
    import asyncio
    import gc

    from torch_armllm.server.settings import ModelSettings, ServerSettings

    names = _names(options)
    engine = {**engine_arguments(options), "runner": options.runner}
    if options.pooler_config is not None:
        engine["pooler_config"] = options.pooler_config
    settings = ServerSettings(
        api_keys=tuple(_keys(options)),
        admin_api_key=_admin_key(options),
        max_request_bytes=options.max_request_bytes,
        max_audio_bytes=options.max_audio_bytes,
        max_queue=options.max_queue,
        max_requests_per_key=options.max_requests_per_key,
        max_tokens_per_minute=options.max_tokens_per_minute,
        max_tokens=options.max_tokens,
        request_timeout=options.request_timeout,
        read_timeout=options.read_timeout,
        write_timeout=options.write_timeout,
        drain_timeout=options.drain_timeout,
        restart=options.restart,
        max_restarts=options.max_restarts,
        allowed_origins=tuple(options.allowed_origin or ()),
        allowed_hosts=tuple(options.allowed_hosts or ()),
        host=options.host,
    )
    adapters = adapter_folders(options, names)
    template = options.chat_template.read_text(encoding="utf-8") if options.chat_template else None
    with collection_paused():
        require_extra(("fastapi", "uvicorn", "prometheus_client"), "serve", "serve")
        from torch_armllm.server.model_registry import ModelRegistry
        from torch_armllm.server.run import allow_many_connections, listen, serve
        from torch_armllm.speech.kind import transcribes
    gc.freeze()
    try:
        listening = listen(options.host, options.port, settings.write_timeout)
    except OSError as error:
        raise OSError(_refused(options.host, options.port, error)) from error

    with listening:
        allow_many_connections()
        registry = ModelRegistry(settings, engine)
        for name, source in zip(names, options.model, strict=True):
            if transcribes(source):
                registry.add_speech(_transcriber(source, options), name, source)
                continue
            parsers = options.tool_call_parser, options.reasoning_parser
            content_format = options.chat_template_content_format
            model = ModelSettings(
                name, source, {"progress": True}, template, *parsers, adapters, content_format
            )
            registry.register(registry.load_llm(model), model)
        host, port = listening.getsockname()[:2]
        address = f"serving {', '.join(names)} at http://{host}:{port}/v1"
        # who reads it may send a signal at once
        asyncio.run(serve(registry, listening, lambda: print(address, flush=True)))


def _refused(host: str, port: int, error: OSError) -> str:
    """Returns why the server cannot listen, and what to change."""
    if isinstance(error, socket.gaierror):
        return f"--host {host} is not known ({error.strerror}): give an address, such as 127.0.0.1"
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else 0
        return f"port {port} of {host} is in use: give another, such as --port {other}, or 0 for any free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine: give 127.0.0.1, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return f"port {port} is reserved for the administrator: give one from 1024 on, such as --port 8000"
    return f"cannot listen at {host}, port {port}: {error}"


def _transcriber(source: str, options: argparse.Namespace) -> Transcriber:
    """Loads a model that transcribes.

    Raises:
        ImportError: the packages that read audio and forms are not installed.
    """
    from torch_armllm.speech.audio import require_audio
    from torch_armllm.speech.transcriber import Transcriber

    require_audio()
    require_extra("python_multipart", "audio", "a server of audio")
    given = engine_arguments(options)
    chosen = {name: given[name] for name in ("dtype", "quantization") if name in given}
    return Transcriber(source, **chosen)


def _names(options: argparse.Namespace) -> list[str]:
    """Returns the models' names in the API.

    Raises:
        ValueError: two models have the same name, or the number of names is not that of the models.
    """
    names: list[str] = options.served_model_name or options.model
    if len(names) != len(options.model):
        raise ValueError(
            f"--served-model-name is given {len(names)} times for {len(options.model)} models: once each"
        )
    if len(set(names)) != len(names):
        raise ValueError(
            f"two models have the same name in {', '.join(names)}; give each a --served-model-name"
        )
    return names


def adapter_folders(options: argparse.Namespace, names: list[str]) -> dict[str, str]:
    """Returns the folders of the adapters by their names in the API.

    Raises:
        ValueError: an entry is not NAME=PATH, a name is in use, or adapters are off or the models several.
    """
    adapters: dict[str, str] = {}
    for entry in options.lora_modules:
        name, _, path = entry.partition("=")
        if not name or not path:
            raise ValueError(f"--lora-modules {entry!r}: give NAME=PATH")
        if name in adapters or name in names:
            raise ValueError(f"--lora-modules: the name {name!r} is in use; give each adapter its own")
        adapters[name] = path
    if adapters and not options.enable_lora:
        raise ValueError("--lora-modules needs --enable-lora")
    if adapters and len(names) > 1:
        raise ValueError("--lora-modules is for one model: load adapters of several by /v1/load_lora_adapter")
    return adapters


def _keys(options: argparse.Namespace) -> list[str]:
    keys: list[str] = options.api_key or [key for key in [os.environ.get(_KEY_VARIABLE, "")] if key]
    if not all(key.strip() for key in keys):
        raise ValueError("--api-key is empty; give a key, or leave it out to serve without keys")
    return keys


def _admin_key(options: argparse.Namespace) -> str | None:
    key: str | None = options.admin_api_key
    if key is None:
        key = os.environ.get(_ADMIN_KEY_VARIABLE) or None
    if key is not None and not key.strip():
        raise ValueError("--admin-api-key is empty; give a key, or leave it out to turn its routes off")
    return key
