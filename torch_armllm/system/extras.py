"""Checks for packages that only some extras of this package install."""

from __future__ import annotations

import importlib.util


def require_extra(package: str, extra: str, user: str) -> None:
    """Checks that an optional package is installed, before anything is computed.

    Args:
        package: name to import.
        extra: the extra of this package that installs it.
        user: the option or command that needs it, for the message.

    Raises:
        ImportError: the package is not installed; the message holds the remedy.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{user} needs {package}: pip install 'torch_armllm[{extra}]'")
