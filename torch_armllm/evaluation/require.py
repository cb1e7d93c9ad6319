"""What evaluation needs beyond torch and transformers."""

from __future__ import annotations

import importlib.util


def require_lm_eval() -> None:
    """Fails early, with the remedy.

    Raises:
        ImportError: lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("lm-eval is not installed: pip install 'torch_armllm[eval]'")


def require_matplotlib() -> None:
    """Fails before anything is computed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'torch_armllm[eval]'")
