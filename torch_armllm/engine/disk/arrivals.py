"""Requests that wait until their blocks are read from the disk."""

from __future__ import annotations

from torch_armllm.engine.request import Request, Status
from torch_armllm.engine.scheduling.scheduler import Scheduler
from torch_armllm.kv_cache.disk.disk_cache import DiskPrefixCache
from torch_armllm.kv_cache.disk.reader import Loading

_WAIT = 0.05
"""Seconds that an idle engine waits for the disk at a time, so that it also sees aborted requests."""
_STEP_BYTES = 16 << 20
"""Bytes that are copied between two steps while other sequences run: a few milliseconds."""


class Arrivals:
    """Holds requests back while their blocks are read, and puts the blocks into the prefix cache.

    The scheduler then finds them there as it finds those of other sequences. Blocks are held only while they
    are filled, between two steps, so that running sequences always find theirs.

    Args:
        disk: has the blocks.
        scheduler: gets the requests.
    """

    def __init__(self, disk: DiskPrefixCache, scheduler: Scheduler) -> None:
        self.disk = disk
        self._scheduler = scheduler
        self._manager = scheduler.blocks
        self._held: dict[str, tuple[Request, Loading]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: Request) -> bool:
        """Holds a request back if the disk has more of its prompt than memory; False if it has not.

        Raises:
            ValueError: the request can never be served.
        """
        self._scheduler.check(request)
        if request.params.prompt_logprobs is not None:
            return False  # the logits of all positions are needed
        if request.pictures is not None:
            return False  # the disk knows token ids only
        loading = self.disk.load(request.prompt_token_ids, len(request.prompt_token_ids) - 1)
        if loading is None:
            return False
        self._held[request.request_id] = request, loading
        return True

    def cancel(self, request_id: str) -> Request | None:
        """Ends a request that is held back; returns None if there is no such request."""
        if request_id not in self._held:
            return None
        request, loading = self._held.pop(request_id)
        loading.cancel()
        for sequence in request.sequences:
            sequence.status, sequence.finish_reason = Status.FINISHED, "abort"
        return request

    def advance(self) -> None:
        """Takes what was read, and gives the requests that have all their blocks to the scheduler.

        Waits a moment if there is nothing else to do.
        """
        idle = not self._scheduler.has_unfinished
        if idle:
            next(iter(self._held.values()))[1].wait(_WAIT)
        room = None if idle else _STEP_BYTES
        for name, (request, loading) in list(self._held.items()):
            room = self._take(request, loading, room)
            if not self._is_pending(loading):
                del self._held[name]
                self._scheduler.add(request)

    def _is_pending(self, loading: Loading) -> bool:
        return loading.blocks_left or loading.states_left

    def _take(self, request: Request, loading: Loading, room: int | None) -> int | None:
        """Takes blocks of up to ``room`` bytes, and the states after the last one; returns the room left."""
        size = self.disk.blocks.nbytes
        most = len(request.prompt_token_ids)
        if room is not None and size:
            most = min(most, -(-room // size))
        if loading.blocks_left and most > 0:
            taken = self._take_blocks(request, loading, most)
            if room is not None:
                room = max(0, room - taken * size)
        if not loading.blocks_left and loading.states_ready:
            self._take_states(request, loading)
        return room

    def _take_blocks(self, request: Request, loading: Loading, most: int) -> int:
        manager, token_ids, start = self._manager, request.prompt_token_ids, loading.done
        size = manager.block_size
        found = manager.find(token_ids, start * size)
        if len(found) < start:  # others needed the memory of the beginning
            loading.cancel()
            return 0
        held = manager.share(found)
        room = manager.free - self._scheduler.running  # each running sequence will need another block
        if room <= 0:
            loading.cancel()
        rows = loading.take(min(most, room)) if room > 0 else []
        blocks = held + manager.allocate(len(rows))
        for block, row in zip(blocks[start:], rows, strict=True):
            self.disk.blocks.put(block, row)
        loading.reuse(rows)
        end = (start + len(rows)) * size
        manager.cache_full_blocks(blocks, token_ids, start * size, end)
        manager.deallocate(blocks)
        if manager.states is None:
            self.disk.hits += len(rows) * size
        return len(rows)

    def _take_states(self, request: Request, loading: Loading) -> None:
        """Makes states the checkpoint of the last block, where a slot is free and all blocks are there."""
        manager, length = self._manager, loading.done * self._manager.block_size
        states, cache = manager.states, manager.prefix_cache
        row = loading.take_states()
        assert states is not None and cache is not None
        blocks = manager.find(request.prompt_token_ids, length)
        # states that are still to be copied may lie in a slot that is free by now
        settled = self._scheduler.states_are_settled
        if row is None or len(blocks) < loading.done or not settled or (slot := states.save()) is None:
            return
        self.disk.states.put(slot, row)
        states.keep(slot, cache.content(blocks[-1]))
        self.disk.hits += length
