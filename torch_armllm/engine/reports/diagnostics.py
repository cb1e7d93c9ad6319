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
from torch_armllm.engine.reports.rank_plan import drawn, rank_plan
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
        "tensor_parallel": rank_plan(),
        "threads": torch.get_num_threads(),
        "engine_threads": str(choose_threads()),
        "free_memory": f"{free_memory() / 1e9:.1f} GB",
        "openmp": openmp_runtimes(),
    }


def warnings(info: dict[str, Any]) -> list[str]:
    """Returns the settings in the result of `describe` that make models slow, each with its remedy."""
    return list(problems(info).values())


def problems(info: dict[str, Any]) -> dict[str, str]:
    """Returns the warnings by what they are about: ``OpenMP``, ``kernels`` or ``cores``."""
    messages = {}
    if len(info["openmp"]) > 1:
        messages["OpenMP"] = (
            f"{len(info['openmp'])} OpenMP runtimes are loaded ({', '.join(info['openmp'])}): threads can "
            "end up on one core; remove the package that brings the second one, or LD_PRELOAD one of them"
        )
    if info["selected"] != info["runnable"][0]:
        messages["kernels"] = (
            f"kernel variant {info['selected']} is in use, {info['runnable'][0]} is the best here: "
            "unset ARMLLM_ISA"
        )
    if info["threads"] > info["cores"]:
        messages["cores"] = (
            f"{info['threads']} threads share {info['cores']} cores: set OMP_NUM_THREADS={info['cores']}"
        )
    elif info["cpu_limit"] is not None and info["threads"] > info["cpu_limit"]:
        messages["cores"] = (
            f"{info['threads']} threads share the time of {info['cpu_limit']:g} cores that the control "
            f"group grants: set OMP_NUM_THREADS={max(int(info['cpu_limit']), 1)}"
        )
    return messages


def render(info: dict[str, Any]) -> str:
    """Formats the result of `describe` for people, warnings included."""
    lines = []
    for name, value in info.items():
        if name == "kernels":
            lines += [
                _line(family, f"{kernel['variant']} ({kernel['why']})") for family, kernel in value.items()
            ]
        elif name == "tensor_parallel":
            lines += [_line(label, text) for label, text in drawn(value)]
        elif name != "numa":  # drawn with the ranks
            lines.append(_line(name, ", ".join(map(str, value)) if isinstance(value, list) else value))
    return "\n".join(lines + [_line("warning", text) for text in warnings(info)])


def _line(name: str, value: object) -> str:
    return labeled(name, value or "-", _INDENT)
