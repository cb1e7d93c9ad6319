"""Checks for packages that only some extras of this package install."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EXTRAS = {
    "PIL": "vision",
    "timm": "timm",
    "av": "video",
    "fastapi": "serve",
    "fastapi_offline": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "httpx": "bench",
    "matplotlib": "bench",
    "lm_eval": "eval",
    "accelerate": "demo",
    "gguf": "gguf",
    "soundfile": "audio",
    "soxr": "audio",
    "python_multipart": "audio",
    "llguidance": "structured",
    "triton": "triton",
    "argcomplete": "completion",
    "ray": "ray",
}
"""The extra that installs an optional package, by the name under which it is imported."""


def require_extra(package: str | Sequence[str], extra: str, user: str) -> None:
    """Checks that optional packages are installed, before anything is computed.

    Args:
        package: name to import, or several.
        extra: the extra of this package that installs it.
        user: the option or command that needs it, for the message.

    Raises:
        ImportError: a package is not installed; the message names all that are missing, and the remedy.
    """
    names = [package] if isinstance(package, str) else package
    missing = [name for name in names if not is_installed(name)]
    if missing:
        raise ImportError(f"{user} needs {' and '.join(missing)}: {install_command(extra)}")


@contextmanager
def naming_extra(package: str, user: str) -> Iterator[None]:
    """Makes errors of another library over a missing package name the extra that installs it.

    Args:
        package: name to import.
        user: what needs it, for the message.

    Raises:
        ImportError: the package is missing.
    """
    try:
        yield
    except ImportError as error:
        if package in str(error):
            raise ImportError(f"{user} needs {package}: {install_command(EXTRAS[package])}") from error
        raise


def is_installed(package: str) -> bool:
    """True if a package can be imported."""
    return importlib.util.find_spec(package) is not None


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of this package."""
    return f'pip install "torch_armllm[{extra}]"'


def with_remedy(error: ImportError) -> str:
    """Returns the message of an import that failed, with the command that installs what is missing."""
    message = str(error)
    package = (error.name or "").partition(".")[0]
    if "pip install" in message or package not in EXTRAS:
        return message
    return f"{message}: {install_command(EXTRAS[package])}"
