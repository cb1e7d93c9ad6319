"""What the project says while it works."""

from __future__ import annotations

import logging

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def show_messages() -> None:
    """Lets messages reach standard error, unless somebody has said where they go.

    Python shows warnings only; that an engine has started, and how fast it runs, are no warnings.
    """
    logger = logging.getLogger("torch_armllm")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
