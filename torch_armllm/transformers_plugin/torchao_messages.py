"""torchao's messages while transformers imports it unasked.

transformers imports torchao, where it is installed, together with its registry of quantizers.  torchao
then warns about the GPU libraries that it cannot load, and makes torch warn about torchao's own enums.
Neither concerns a user who never asked for torchao, so these messages go to this module's logger at level
DEBUG.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_LIBRARIES = ("Failed to load ", "Skipping import of cpp extensions")


@contextmanager
def torchao_messages_hidden() -> Iterator[None]:
    """Logs torchao's import-time warnings at DEBUG inside the block; every other record passes.

    A process that has imported torchao before is left alone.
    """
    if "torchao" in sys.modules:
        yield
        return
    filtered = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for source in filtered:
        source.addFilter(_passes)
    try:
        yield
    finally:
        for source in filtered:
            source.removeFilter(_passes)


def _passes(record: logging.LogRecord) -> bool:
    if record.levelno != logging.WARNING or not _is_import_message(record):
        return True
    logger.debug("%s", record.getMessage())
    return False


def _is_import_message(record: logging.LogRecord) -> bool:
    if record.name == "torchao":
        return record.getMessage().startswith(_LIBRARIES)
    enum = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return getattr(enum, "__module__", "").partition(".")[0] == "torchao"
