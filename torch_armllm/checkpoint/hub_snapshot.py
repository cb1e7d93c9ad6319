"""A revision of a model on the hub, as a folder."""

from __future__ import annotations

from pathlib import Path

from torch_armllm.checkpoint.source_name import check_source

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Files of a checkpoint that a model and its tokenizer need."""


def hub_snapshot(source: str, revision: str | None = None) -> Path:
    """Returns the folder of a model on the hub, downloaded if it is not there.

    Args:
        source: name on the hub.
        revision: a branch, a tag or a commit; None: the default branch.

    Raises:
        FileNotFoundError: the text cannot be a name on the hub.
        ValueError: it is a folder or a file, which has no revisions.
        OSError: the hub has no such model or revision, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    check_source(source)
    if Path(source).expanduser().exists():
        raise ValueError(f"revision={revision!r} is for names on the model hub, and {source} is on this disk")
    return Path(snapshot_download(source, revision=revision, allow_patterns=list(FILES)))
