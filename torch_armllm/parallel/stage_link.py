"""Connections of a pipeline stage to the one before it and the one after it."""

from __future__ import annotations

import contextlib
import struct
import threading
from queue import SimpleQueue
from socket import MSG_WAITALL, SHUT_RDWR, socket, socketpair
from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.collective import gather_columns
from torch_armllm.parallel.rank_group import RankGroup, shares
from torch_armllm.parallel.rank_place import RankPlace

_HEADER = struct.Struct("<qqqq")
"""Rows, columns that are sent, columns of all ranks, and the number of the dtype."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STAGE_SECONDS = 300.0
"""Time after which a stage that does not answer is an error."""
_KEPT = 16
"""Sizes of rows whose memory is kept."""


class LostStageError(RuntimeError):
    """Another stage has ended, for a reason of its own."""


class StageLink:
    """Receives rows of hidden states from one stage and sends others to the next one.

    Rows are sent by a thread of its own: a stage that computes does not read, and stages in a ring that all
    waited for the next one to read would wait for ever.

    Each tensor parallel rank of a stage sends its share of the columns to the same rank of the next stage,
    whose ranks then gather them: no column crosses a network twice.

    Args:
        previous: socket from the stage before; the last one is before the first.
        following: socket to the stage after; it may be the same.
        seconds: time after which a stage that does not answer is an error.
        group: the tensor parallel ranks of this stage, which all send and receive the same rows; None: it is
            one process.
    """

    def __init__(
        self,
        previous: socket,
        following: socket,
        seconds: float = STAGE_SECONDS,
        group: RankGroup | None = None,
    ) -> None:
        self._previous, self._following = previous, following
        self._seconds, self._group = seconds, group
        for each in {previous, following}:
            each.settimeout(seconds)
        self._memory: dict[tuple[int, ...], Tensor] = {}
        self._to_send: SimpleQueue[tuple[Tensor, int] | None] = SimpleQueue()
        self._error: Exception | None = None
        self._sender = threading.Thread(target=self._send_all, name="armllm-stage", daemon=True)
        self._sender.start()

    def send(self, rows: Tensor) -> None:
        """Sends a copy of rows ``(R, columns)`` without waiting for the next stage.

        Raises:
            LostStageError: the next stage has ended, or has not read earlier rows in time.
        """
        if self._error is not None:
            raise LostStageError(f"the connection to the next stage failed: {self._error}") from self._error
        columns = rows.shape[1]
        if self._group is not None:
            own = self._group.share(columns)
            rows = rows[:, own.start : own.stop]
        self._to_send.put((rows.detach().clone(memory_format=torch.contiguous_format), columns))

    def receive(self, rows: int) -> Tensor:
        """Waits for rows ``(rows, columns)``; they are valid until the next call.

        Raises:
            LostStageError: the stage before has ended.
            RuntimeError: it does not answer, or sends another number of rows.
        """
        header = _HEADER.unpack(self._read(bytearray(_HEADER.size)))
        count, columns, all_columns, dtype = header
        if count != rows or not 0 <= dtype < len(_DTYPES):
            raise RuntimeError(f"the stage before sends {count} rows of a step with {rows}")
        memory = self._memory.pop(header, None)
        if memory is None:
            memory = torch.empty(count, columns, dtype=_DTYPES[dtype])
            if len(self._memory) == _KEPT:
                del self._memory[next(iter(self._memory))]  # the least recently used
        self._memory[header] = memory
        if memory.numel():
            self._read(_bytes_of(memory))
        if self._group is None:
            return memory
        parts = [len(part) for part in shares(all_columns, self._group.size)]
        return gather_columns(memory, self._group.communicator, parts)

    def close(self) -> None:
        """Ends the connections; stages that wait for rows get an error."""
        self._to_send.put(None)
        for each in {self._previous, self._following}:
            with contextlib.suppress(OSError):  # closed by the other end
                each.shutdown(SHUT_RDWR)
        self._sender.join()
        for each in {self._previous, self._following}:
            each.close()

    def _read(self, memory: Any) -> Any:
        left = memoryview(memory).cast("B")
        while left:
            try:
                count = self._previous.recv_into(left, len(left), MSG_WAITALL)
            except TimeoutError:
                raise RuntimeError(f"the stage before has not answered for {self._seconds:g} s") from None
            except OSError as error:
                raise LostStageError(f"the connection to the stage before failed: {error}") from error
            if count == 0:
                raise LostStageError("the stage before has ended")
            left = left[count:]
        return memory

    def _send_all(self) -> None:
        while (sent := self._to_send.get()) is not None:
            if self._error is not None:
                continue
            rows, columns = sent
            try:
                self._following.sendall(_HEADER.pack(*rows.shape, columns, _DTYPES.index(rows.dtype)))
                if rows.numel():
                    self._following.sendall(_bytes_of(rows))
            except OSError as error:
                self._error = error


def rings(tensor_ranks: int, stages: int) -> list[tuple[socket, socket]]:
    """Returns the sockets of each rank of a machine: from the stage before, and to the one after it."""
    places = [RankPlace(rank, tensor_ranks, stages) for rank in range(tensor_ranks * stages)]
    pairs = [socketpair() for _ in places]
    return [(pairs[place.previous][1], pairs[place.rank][0]) for place in places]


def _bytes_of(rows: Tensor) -> Any:
    return rows.view(-1).view(torch.uint8).numpy()
