"""Log output of this package."""

from __future__ import annotations

import logging

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def show_messages() -> None:
    """Prints this package's messages to standard error, unless logging is already configured.

    Python prints warnings only by default, and the start and the speed of an engine are no warnings.
    """
    logger = logging.getLogger("torch_armllm")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
