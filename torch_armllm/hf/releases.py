"""Releases of torch and transformers that this version was tested with."""

from __future__ import annotations

import warnings

NEWEST_TESTED = {"transformers": "5.24.0", "torch": "2.15"}
"""The newest tested release of each; a part that is left out may be any."""


def warn_if_newer() -> None:
    """Warns if a newer release than the newest tested one is installed, and names both.

    Python shows a warning of the same line once a process.
    """
    import torch
    import transformers
    from packaging.version import Version

    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    for name, tested in NEWEST_TESTED.items():
        newest = Version(tested).release
        if Version(installed[name]).release[: len(newest)] > newest:
            warnings.warn(
                f"{name} {installed[name]} is newer than {tested}, the newest release that this version of "
                "torch_armllm was tested with. Where a patched model differs from its modules in a short "
                f"trial, it keeps its modules; install {name}=={tested} or a newer torch_armllm to be sure",
                stacklevel=1,
            )
