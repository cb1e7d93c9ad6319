"""Engine options shared by all commands that run an engine."""

from __future__ import annotations

import argparse
from typing import Any

from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import add_settings, given_settings
from torch_armllm.engine.config import EngineConfig
from torch_armllm.llm.loading.load_settings import LoadSettings, PoolingSettings


def add_engine_options(parser: Parser, max_num_seqs: int | None = None) -> None:
    """Adds the options; their names are those of the settings of `LLM`.

    Args:
        parser: of the command.
        max_num_seqs: the command's default of this setting; None: the engine's.
    """
    group = parser.add_argument_group("model and engine")
    add_settings(group, LoadSettings, {"dtype": "auto", "quantization": "auto"})
    add_settings(group, EngineConfig, {"max_num_seqs": max_num_seqs})


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `LLM`; settings that were not given are left out."""
    owners = LoadSettings, PoolingSettings, EngineConfig
    return {name: value for owner in owners for name, value in given_settings(options, owner).items()}
