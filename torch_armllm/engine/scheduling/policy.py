"""Who is served first."""

from __future__ import annotations

from typing import Protocol

from torch_armllm.engine.request import Request


class Policy(Protocol):
    """Puts requests in an order; those that it ranks alike are served as they came."""

    def rank(self, request: Request) -> float:
        """Smaller ones are admitted first and lose their blocks last; asked once, at submission."""
        ...


class PriorityPolicy:
    """By `Request.priority`."""

    def rank(self, request: Request) -> float:
        """The priority as it is."""
        return request.priority
