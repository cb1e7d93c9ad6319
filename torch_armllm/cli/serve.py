"""The command ``torch-armllm serve``."""

from __future__ import annotations

import argparse
import errno
import os
import socket
from typing import TYPE_CHECKING

from torch_armllm.cli import Subcommands, add_command, add_model
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import add_settings, given_settings
from torch_armllm.llm.loading.load_settings import PoolingSettings
from torch_armllm.server.settings import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, ModelSettings, ServerSettings
from torch_armllm.system.extras import require_extra
from torch_armllm.system.gc_pause import collection_paused

if TYPE_CHECKING:  # imports transformers
    from torch_armllm.speech.transcriber import Transcriber


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
    add_model(parser, "*")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model in the API, once per model (default: the model argument)",
    )
    add_settings(group, ServerSettings, {"host": "127.0.0.1"})
    add_settings(group, ModelSettings)
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="serve the model with these LoRA adapters, too; needs --enable-lora",
    )
    add_engine_options(parser)
    add_settings(parser.add_argument_group("pooling models"), PoolingSettings)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Loads the models and serves them until a signal arrives."""
    import asyncio
    import gc

    names = _names(options)
    keys = {"api_keys": tuple(_keys(options)), "admin_api_key": _admin_key(options)}
    settings = ServerSettings(**given_settings(options, ServerSettings) | keys)
    adapters = adapter_folders(options, names)
    of_models = given_settings(options, ModelSettings)
    if options.chat_template is not None:
        of_models["chat_template"] = options.chat_template.read_text(encoding="utf-8")
    with collection_paused():
        require_extra(("fastapi", "uvicorn", "prometheus_client"), "serve", "serve")
        from torch_armllm.server.model_registry import ModelRegistry
        from torch_armllm.server.run import allow_many_connections, listen, serve
        from torch_armllm.speech.kind import transcribes
    gc.freeze()
    try:
        listening = listen(settings.host, settings.port, settings.write_timeout)
    except OSError as error:
        raise OSError(_refused(settings.host, settings.port, error)) from error

    with listening:
        allow_many_connections()
        registry = ModelRegistry(settings, engine_arguments(options))
        for name, source in zip(names, options.model, strict=True):
            if transcribes(source):
                registry.add_speech(_transcriber(source, options), name, source)
                continue
            model = ModelSettings(name, source, {"progress": True}, adapters=adapters, **of_models)
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
    from torch_armllm.engine.media.audio_files import require_audio
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
    keys: list[str] = options.api_key or [key for key in [os.environ.get(API_KEY_VARIABLE, "")] if key]
    if not all(key.strip() for key in keys):
        raise ValueError("--api-key is empty; give a key, or leave it out to serve without keys")
    return keys


def _admin_key(options: argparse.Namespace) -> str | None:
    key: str | None = options.admin_api_key
    if key is None:
        key = os.environ.get(ADMIN_KEY_VARIABLE) or None
    if key is not None and not key.strip():
        raise ValueError("--admin-api-key is empty; give a key, or leave it out to turn its routes off")
    return key
