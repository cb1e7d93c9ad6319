"""A replica, as the process that has started it sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch_armllm.engine.reports.stats import EngineStats, Gauges
from torch_armllm.llm.loading.engine_facts import EngineFacts
from torch_armllm.llm.replicas.messages import Failed, Loaded, Stats
from torch_armllm.system.child_process import ChildProcess


class Replica:
    """An engine in a process of its own.

    Args:
        number: of the replica.
        cpus: on which its process runs.
        arguments: of `torch_armllm.LLM`.

    Attributes:
        load: unfinished sequences.
        number: see above.
        reason: why it has ended; None while it runs.
        reads: true while messages may come.
        stats: statistics of its engine, as last told.
    """

    def __init__(self, number: int, cpus: Sequence[int], arguments: Mapping[str, Any]) -> None:
        self.number = number
        self.load = 0
        self.reason: str | None = None
        self.reads = True
        self._gauges = Gauges(0, 0, 0.0, 0.0)
        self.stats = EngineStats(lambda: self._gauges, log=False)
        self._closed = False
        self._child = ChildProcess("torch_armllm.llm.replicas.replica_process", cpus)
        self._child.connection.send(dict(arguments))

    @property
    def connection(self) -> Connection:
        """The connection to the process."""
        return self._child.connection

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._child.process.pid

    def wait_until_loaded(self) -> EngineFacts:
        """Waits for the engine.

        Raises:
            ValueError: it could not be built; the message says why.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            message = Failed(self._child.reason())
        if isinstance(message, Loaded):
            return message.facts
        assert isinstance(message, Failed)
        raise ValueError(f"replica {self.number} failed: {message.reason}")

    def watch(self, ended: Callable[[Replica], object]) -> None:
        """Begins to wait for the end of the process, and calls a function then, unless it was closed."""

        def wait() -> None:
            self._child.process.wait()
            if not self._closed:
                self.note_end()
                ended(self)

        threading.Thread(target=wait, name=f"armllm-replica-{self.number}", daemon=True).start()

    def note_end(self) -> None:
        """Sets the reason of an end."""
        if self.reason is None:
            self.reason = f"replica {self.number} has ended: {self._child.reason()}"

    def send(self, message: Any) -> bool:
        """Sends a message; False if the process has gone."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def update(self, stats: Stats) -> None:
        """Takes statistics that the process has told."""
        self._gauges, self.stats.totals = stats.gauges, stats.totals

    def close(self) -> None:
        """Ends the process."""
        self._closed = True
        self._child.close()
