"""The thread team that runs ops."""

from __future__ import annotations

import torch


def team_threads() -> list[int]:
    """Linux thread ids of the team that runs an op; the calling thread's id comes first."""
    ids: list[int] = torch.ops.armllm.team_threads()
    return ids
