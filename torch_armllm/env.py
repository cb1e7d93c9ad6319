"""What this machine and this process offer: the doctor."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from torch_armllm import __version__

OPENMP = ("libgomp", "libiomp5", "libomp")


def openmp_runtimes(maps: str | None = None) -> list[str]:
    """Files of the OpenMP runtimes that this process has loaded.

    Args:
        maps: text in the format of ``/proc/self/maps``, which is read by default.
    """
    if maps is None:
        file = Path("/proc/self/maps")
        maps = file.read_text() if file.exists() else ""
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if Path(file).name.startswith(OPENMP))


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("model name", "cpu model", "hardware"):
                return value.strip()
    return platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """Everything that matters for speed, as plain JSON types."""
    from torch_armllm.ops import LIBRARY_PATH, isa

    machine = isa.machine()
    return {
        "torch_armllm": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "features": list(machine.features),
        "variants": list(machine.variants),
        "runnable": list(machine.runnable),
        "selected": machine.selected,
        "ARMLLM_ISA": os.environ.get("ARMLLM_ISA", ""),
        "library": str(LIBRARY_PATH),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "openmp": openmp_runtimes(),
    }


def warnings(found: dict[str, Any]) -> list[str]:
    """What in `describe`'s answer makes models slow, and what to do about it."""
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
    return told


def render(found: dict[str, Any]) -> str:
    """`describe`'s answer for people."""
    lines = []
    for name, value in found.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        lines.append(f"{name:<14}{text or '-'}")
    return "\n".join(lines + [f"warning       {text}" for text in warnings(found)])
