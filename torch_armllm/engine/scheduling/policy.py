"""Scheduling policies: the order in which requests are served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # imports torch
    from torch_armllm.engine.request import Request


class Policy(Protocol):
    """Orders requests; requests with equal keys are served in order of arrival."""

    def sort_key(self, request: Request) -> float:
        """Requests with a smaller key are admitted first and preempted last; called once, at submission."""
        ...


class PriorityPolicy:
    """Orders requests by `Request.priority`."""

    def sort_key(self, request: Request) -> float:
        """Returns the priority."""
        return request.priority
