"""A verdict on the machine and the installation, with remedies (``torch-armllm doctor``)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torch_armllm.engine.reports.diagnostics import problems
from torch_armllm.system.extras import EXTRAS, install_command, is_installed
from torch_armllm.system.files import cache_folder, format_bytes
from torch_armllm.system.host import free_memory
from torch_armllm.system.huge_pages import SETTING, collapse, page_size
from torch_armllm.system.text_layout import labeled

OLDEST = {"python": (3, 10), "torch": (2, 10), "transformers": (5, 21, 0)}
"""Oldest versions that this package supports."""
_LEAST_MEMORY = 2 * 10**9
"""Free bytes below which only the smallest models run."""
_BYTES_PER_WEIGHT = 0.65
"""Of an INT4 model with its KV cache, and some room."""
_INDENT = 16


@dataclass(frozen=True)
class Finding:
    """The state of one thing.

    Attributes:
        name: of the thing, a word or two.
        text: its state.
        remedy: what to change; empty: nothing has to be changed.
    """

    name: str
    text: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding as plain JSON types."""
        return {**asdict(self), "ok": not self.remedy}


def examine(info: dict[str, Any]) -> list[Finding]:
    """Returns a finding for everything that matters.

    Args:
        info: the result of `torch_armllm.engine.reports.diagnostics.describe`.
    """
    found = problems(info)
    limit = "" if info["cpu_limit"] is None else f", of which the control group grants {info['cpu_limit']:g}"
    numa = f" on {len(info['numa'])} NUMA nodes" if len(info["numa"]) > 1 else ""
    return [
        *_versions(info),
        _with_problem("kernels", f"{info['selected']}, for {info['cpu']}", found),
        _with_problem("cores", f"{info['cores']}{numa}{limit}; engines take {info['engine_threads']}", found),
        memory(free_memory()),
        huge_pages(),
        _with_problem("OpenMP", f"{len(info['openmp'])} loaded: {', '.join(info['openmp']) or '-'}", found),
        _cache(),
        Finding("extras", _extras()),
    ]


def verdict(findings: list[Finding]) -> str:
    """Returns the verdict in one line."""
    wrong = [finding.name for finding in findings if finding.remedy]
    if not wrong:
        return "everything is in order"
    return f"{len(wrong)} thing{'s' if len(wrong) > 1 else ''} to change: {', '.join(wrong)}"


def render(findings: list[Finding]) -> str:
    """Formats findings for people, the verdict last."""
    lines = []
    for finding in findings:
        lines.append(labeled(f"{'!' if finding.remedy else ' '} {finding.name}", finding.text, _INDENT))
        if finding.remedy:
            lines.append(labeled("", f"-> {finding.remedy}", _INDENT))
    return "\n".join([*lines, "", verdict(findings)])


def _versions(info: dict[str, Any]) -> Iterator[Finding]:
    yield Finding("torch_armllm", str(info["torch_armllm"]))
    for name, oldest in OLDEST.items():
        text = ".".join(map(str, oldest))
        old = _release(str(info[name])) < oldest
        update = f"install Python {text} or newer" if name == "python" else f'pip install -U "{name}>={text}"'
        yield Finding(name, f"{info[name]}{f', older than {text}' if old else ''}", update if old else "")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])


def _with_problem(name: str, text: str, found: dict[str, str]) -> Finding:
    return Finding(name, text, found.get(name, ""))


def memory(free: int) -> Finding:
    """Returns what fits in the free memory.

    Args:
        free: its bytes.
    """
    largest = free / _BYTES_PER_WEIGHT / 1e9
    text = f"{format_bytes(free)} are free: INT4 models of up to about {largest:.2g} billion parameters"
    if free >= _LEAST_MEMORY:
        return Finding("memory", text)
    return Finding(
        "memory", text, "end other programs, or raise the memory limit of the container or control group"
    )


def huge_pages() -> Finding:
    """Returns whether weights get huge pages: tried on some memory, as kernels differ."""
    if os.environ.get(SETTING) == "0":
        return Finding("huge pages", f"off by {SETTING}=0", f"unset {SETTING}")
    page = page_size()
    if page == 0:
        return Finding(
            "huge pages",
            "off in this kernel: large layers are read at two thirds of the speed",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    moved = collapse([torch.ones(4 * page, dtype=torch.uint8)])
    if moved == 0:
        return Finding(
            "huge pages",
            "this kernel does not collapse memory in place, or has no free huge page",
            "use Linux 6.1 or newer; where memory is fragmented: echo 1 | sudo tee "
            "/proc/sys/vm/compact_memory",
        )
    return Finding("huge pages", f"of {page >> 20} MB, in use for weights")


def _cache() -> Finding:
    """Returns whether plans and the bundled model can be kept on disk."""
    try:
        folder = cache_folder()
    except FileNotFoundError as error:
        return Finding("cache folder", "none", str(error))
    existing = next((part for part in (folder, *folder.parents) if part.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            "cache folder",
            f"{folder} cannot be written: models are converted at every start",
            "set XDG_CACHE_HOME to a folder that can be written",
        )
    return Finding("cache folder", f"{folder}, {format_bytes(shutil.disk_usage(existing).free)} free")


def _extras() -> str:
    """Returns which optional packages are missing, and the extras that bring them; none of them is needed."""
    missing: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        if not is_installed(package):
            missing.setdefault(extra, []).append(package)
    if not missing:
        return "all optional packages are installed"
    told = [f"{' and '.join(names)} ({install_command(extra)})" for extra, names in missing.items()]
    return f"not installed, and needed only for what their names say: {'; '.join(told)}"
