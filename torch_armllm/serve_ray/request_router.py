"""Ray Serve's choice of a replica: the one that holds the beginning of the request's text."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from torch_armllm.llm.replicas.prefix_router import PrefixRouter

_CAPACITY = 1 << 20
"""Bytes of text of each replica that are remembered."""
_CHUNK = 64


class PrefixRequestRouter(RequestRouter):
    """Chooses replicas by `PrefixRouter`, for calls with a `RelayedRequest`.

    A replica that has no room for another request is left for those with the least load.
    """

    def initialize_state(self, **settings: Any) -> None:
        """See Ray Serve."""
        self._prefixes: PrefixRouter[ReplicaID] = PrefixRouter(_CAPACITY, _CHUNK)
        self._running: dict[str, ReplicaID] = {}  # by Ray's number of the request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See Ray Serve: replicas by their rank."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        loads = dict.fromkeys(by_id, 0)
        for replica_id in self._running.values():
            if replica_id in loads:
                loads[replica_id] += 1
        text = pending_request.args[0].text if pending_request and pending_request.args else b""
        best = self._prefixes.choose(text, loads)
        others = sorted((each for each in by_id if each != best), key=lambda each: loads[each])
        return [[by_id[each]] for each in (best, *others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See Ray Serve."""
        self._running[pending_request.metadata.internal_request_id] = replica_id
        if pending_request.args:
            self._prefixes.record(replica_id, pending_request.args[0].text)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See Ray Serve."""
        self._running.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See Ray Serve."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.forget(replica_id)
        self._running = {name: each for name, each in self._running.items() if each != replica_id}
