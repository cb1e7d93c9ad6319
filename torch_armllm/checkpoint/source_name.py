"""Names of models: paths, names on the model hub, or of the bundled model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DENSE = "smollm2"
"""Name of the bundled model."""
MOE = "smollm2-moe"
"""Name of the Mixture-of-Experts that is made from it."""
_FILES = (".gguf", ".safetensors")


def check_source(source: str) -> None:
    """Checks that a model is a path that exists, or can be a name on the model hub.

    Raises:
        FileNotFoundError: it is neither.
    """
    if Path(source).expanduser().exists() or (_is_hub_name(source) and not source.endswith(_FILES)):
        return
    raise FileNotFoundError(
        f"{source} does not exist: give a folder, a GGUF file, or a name on the model hub such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )


@contextmanager
def not_found(source: str) -> Iterator[None]:
    """Makes an error of the model hub say that the model is no folder either, and what may have been meant.

    Raises:
        OSError: the hub does not have the model, or cannot be reached.
    """
    try:
        yield
    except OSError as error:
        if Path(source).expanduser().exists():
            raise
        close = difflib.get_close_matches(source, (DENSE, MOE), n=1, cutoff=0.7)
        meant = f"; did you mean {close[0]}?" if close else ""
        said = str(error).strip().partition("\n")[0]
        raise OSError(f"there is no folder {source}, and the model hub gave none: {said}{meant}") from error


def _is_hub_name(source: str) -> bool:
    # imported here: engines of folders start without the hub's client
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True
