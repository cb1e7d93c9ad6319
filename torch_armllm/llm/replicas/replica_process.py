"""The program of a replica: an engine that answers the process that has started it.

    python -m torch_armllm.llm.replicas.replica_process CONNECTION

The argument is the descriptor of a socket.  Messages there and back are pickled; the program ends when the
socket closes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from torch_armllm.engine.errors import StepFailedError
from torch_armllm.engine.outputs import FailedOutput, RequestOutput
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.llm.llm import LLM
from torch_armllm.llm.replicas.messages import (
    Abort,
    Call,
    Ended,
    Failed,
    Loaded,
    Returned,
    Short,
    Stats,
    Stepped,
)
from torch_armllm.system.panics import PANICS_AS_ERRORS

_STATS_INTERVAL = 0.5
"""Seconds between two messages of statistics while requests run."""


def main() -> None:
    """Serves the parent until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    connection = Connection(int(sys.argv[1]))
    try:
        _Server(connection).run()
    except (EOFError, BrokenPipeError, ConnectionError):  # the parent has gone
        os._exit(1)
    except Exception as error:
        traceback.print_exc()
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)


class _Server:
    """Runs the engine between the messages of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        llm = LLM(**connection.recv())
        self._engine = llm.llm_engine
        connection.send(Loaded(llm._facts))
        self._next_stats = 0.0

    def run(self) -> None:
        """Serves until the connection closes."""
        engine, connection = self._engine, self._connection
        while True:
            while not engine.has_unfinished_requests() or connection.poll():
                self._handle(connection.recv())
            self._step()

    def _handle(self, message: Any) -> None:
        engine = self._engine
        if isinstance(message, NewRequest):
            try:
                with PANICS_AS_ERRORS:
                    engine.add_request(message)
            except Exception as error:
                self._connection.send(Stepped([], [Ended(message.request_id, True, str(error))]))
        elif isinstance(message, Abort):
            self._send(engine.abort_request(message.request_ids))
        elif isinstance(message, Call):
            try:
                with PANICS_AS_ERRORS:
                    result = getattr(engine, message.method)(*message.arguments)
            except Exception as error:
                self._connection.send(Returned(message.number, None, str(error)))
            else:
                self._connection.send(Returned(message.number, result, None))

    def _step(self) -> None:
        try:
            self._send(self._engine.step())
        except StepFailedError as failure:
            traceback.print_exc()
            reason = repr(failure.__cause__)
            ended = [Ended(name, False, reason) for name in failure.request_ids]
            self._connection.send(Stepped([], ended))

    def _send(self, outputs: list[RequestOutput | FailedOutput]) -> None:
        # before the last output, behind which nobody may wait for messages
        if time.monotonic() >= self._next_stats or not self._engine.has_unfinished_requests():
            self._send_stats()
        if outputs:
            done = [Short.of(output) for output in outputs if isinstance(output, RequestOutput)]
            failed = [each for each in outputs if isinstance(each, FailedOutput)]
            ended = [Ended(each.request_id, True, str(each.error)) for each in failed]
            self._connection.send(Stepped(done, ended))

    def _send_stats(self) -> None:
        stats = self._engine.stats
        self._connection.send(Stats(stats.gauges(), stats.totals))
        self._next_stats = time.monotonic() + _STATS_INTERVAL


if __name__ == "__main__":
    main()
