"""Describes the machine and the process, and what makes models slow on them (``torch-armllm env``)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

from torch_armllm._version import __version__
from torch_armllm.engine.execution.thread_team import choose_threads
from torch_armllm.ops import LIBRARY_PATH, variants
from torch_armllm.system.host import cores, cpu_limit, cpu_name, free_memory, numa_nodes, openmp_runtimes
from torch_armllm.system.text_layout import labeled

_INDENT = 16


def describe() -> dict[str, Any]:
    """Returns everything that matters for speed, as plain JSON types."""
    machine = variants.machine()
    return {
        "torch_armllm": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "features": list(machine.features),
        "sve_bits": machine.sve_bits,
        "sme_bits": machine.sme_bits,
        "variants": list(machine.variants),
        "runnable": list(machine.runnable),
        "selected": machine.selected,
        "kernels": {family: asdict(choice) for family, choice in machine.families.items()},
        "ARMLLM_ISA": os.environ.get("ARMLLM_ISA", ""),
        "library": str(LIBRARY_PATH),
        "cores": cores(),
        "cpu_limit": cpu_limit(),
        "numa": numa_nodes(),
        "threads": torch.get_num_threads(),
        "engine_threads": str(choose_threads()),
        "free_memory": f"{free_memory() / 1e9:.1f} GB",
        "openmp": openmp_runtimes(),
    }


def warnings(found: dict[str, Any]) -> list[str]:
    """Returns the settings in the result of `describe` that make models slow, each with its remedy."""
    told = []
    if len(found["openmp"]) > 1:
        told.append(
            f"{len(found['openmp'])} OpenMP runtimes are loaded ({', '.join(found['openmp'])}): threads can "
            "end up on one core; remove the package that brings the second one, or LD_PRELOAD one of them"
        )
    if found["selected"] != found["runnable"][0]:
        told.append(
            f"kernel variant {found['selected']} is in use, {found['runnable'][0]} is the best here: "
            "unset ARMLLM_ISA"
        )
    if found["threads"] > found["cores"]:
        told.append(
            f"{found['threads']} threads share {found['cores']} cores: set OMP_NUM_THREADS={found['cores']}"
        )
    elif found["cpu_limit"] is not None and found["threads"] > found["cpu_limit"]:
        told.append(
            f"{found['threads']} threads share the time of {found['cpu_limit']:g} cores that the control "
            f"group grants: set OMP_NUM_THREADS={max(int(found['cpu_limit']), 1)}"
        )
    return told


def render(found: dict[str, Any]) -> str:
    """Formats the result of `describe` for people, warnings included."""
    lines = []
    for name, value in found.items():
        if name == "kernels":
            lines += [
                _line(family, f"{kernel['variant']} ({kernel['why']})") for family, kernel in value.items()
            ]
        elif isinstance(value, dict):
            lines += [_line(f"{name} {key}", inner) for key, inner in value.items()] or [_line(name, None)]
        else:
            lines.append(_line(name, ", ".join(map(str, value)) if isinstance(value, list) else value))
    return "\n".join(lines + [_line("warning", text) for text in warnings(found)])


def _line(name: str, value: object) -> str:
    return labeled(name, value or "-", _INDENT)
