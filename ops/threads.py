"""The threads that run ops."""

from __future__ import annotations

import torch


def team_threads() -> list[int]:
    """The system's ids of the threads that an op runs on; the calling thread is the first."""
    ids: list[int] = torch.ops.armllm.team_threads()
    return ids
