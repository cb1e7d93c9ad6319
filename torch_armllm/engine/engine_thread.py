"""The thread that runs an engine, and its output streams to coroutines."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch_armllm.engine.engine_protocol import Engine
from torch_armllm.engine.errors import RequestAbortedError, StepFailedError
from torch_armllm.engine.outputs import FailedOutput
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.system.panics import PANICS_AS_ERRORS

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
"""Running requests in a pause: it ends them, waits for them, or keeps them for later."""

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine has stopped; ``__cause__`` says why."""


class OutputStream:
    """Outputs of one request, or of several that pool, for the coroutine that waits for them.

    A new output replaces those that were not read yet, as it contains them; delta outputs are all kept, and
    those of pooling requests.

    Args:
        params: of the request; None: pooling requests.
    """

    def __init__(self, params: SamplingParams | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._keep_all = params is None or params.output_kind is RequestOutputKind.DELTA
        self._outputs: deque[Any] = deque()
        self._arrived = asyncio.Event()

    def put(self, output: Any) -> None:
        """Adds an output; called in the event loop of the coroutine."""
        if not self._keep_all and not isinstance(output, Exception):
            self._outputs.clear()
        self._outputs.append(output)
        self._arrived.set()

    async def get(self) -> Any:
        """Waits for the next output and returns it, or raises the request's error."""
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        return output


class _Named(Protocol):
    """A request of any kind."""

    @property
    def request_id(self) -> str: ...


class _Add(NamedTuple):
    request: _Named
    stream: OutputStream


class _Abort(NamedTuple):
    request_id: str
    stream: OutputStream | None  # None: any request of this id


class _Call(NamedTuple):
    work: Callable[[], object]
    done: Future[Any]


class _Pause(NamedTuple):
    mode: PauseMode
    done: Future[None]


class EngineThread:
    """Runs an engine: computes steps while there are requests, and sleeps while there are none.

    Only this thread touches the engine. Other threads put commands into its inbox, which it reads between two
    steps. A failed step ends the requests that were part of it; any other error ends the thread and is raised
    for all waiters.

    Attributes:
        ended: done once the thread has ended.
        error: the reason for the end; None while the engine runs.
    """

    def __init__(self, engine: Engine[Any]) -> None:
        self.error: EngineDeadError | None = None
        self.ended: Future[None] = Future()
        self._engine = engine
        self._streams: dict[str, OutputStream] = {}
        self._changed = threading.Condition()
        self._inbox: deque[_Add | _Abort | _Call | _Pause] = deque()
        self._taken: deque[_Add | _Abort | _Call | _Pause] = deque()  # from the inbox; the first is under way
        self._stopping = False
        self._failure: Exception | None = None
        self._paused = False
        self._draining: list[Future[None]] = []
        self._held: dict[OutputStream, _Add] = {}  # requests that came while a pause waits for others
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="armllm-engine", daemon=True)
        self._thread.start()

    def add(self, request: _Named, stream: OutputStream) -> None:
        """Submits a request; its outputs or its error go to a stream.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        self._post(_Add(request, stream))

    def abort(self, request_id: str, stream: OutputStream | None = None) -> None:
        """Ends a request; with a stream, only if the request's outputs go to that stream."""
        if self.error is None and os.getpid() == self._process:
            self._post(_Abort(request_id, stream))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs a function between two steps.

        Raises:
            EngineDeadError: the engine has stopped; if it stops later, the future raises it.
        """
        done: Future[T] = Future()
        self._post(_Call(work, done))
        return done

    def pause(self, mode: PauseMode) -> Future[None]:
        """Computes no step until `resume`; requests that come meanwhile wait.

        Returns:
            A future that is done once nothing is computed any more.

        Raises:
            EngineDeadError: the engine has stopped; if it stops later, the future raises it.
        """
        done: Future[None] = Future()
        self._post(_Pause(mode, done))
        return done

    def resume(self) -> None:
        """Ends a pause, also one that still waits; called by `call`, in the engine's thread."""
        self._paused = False
        self._end_drain()

    @property
    def paused(self) -> bool:
        """True while a pause lasts, which may still wait for requests."""
        return self._paused or bool(self._draining)

    def check(self) -> None:
        """Raises `EngineDeadError` if the engine has stopped, or runs in the process that forked this one."""
        self._check_process()
        if self.error is not None:
            raise self._death()

    def stop(self) -> None:
        """Ends the thread after the current step; waiters get an error."""
        if os.getpid() != self._process:  # the thread was not forked, and another may have held the lock
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
            self._engine.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def end(self, error: Exception) -> None:
        """Ends the thread before its next step with an error of something that the engine needs."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineDeadError(
                f"the engine runs in process {self._process}, and this one was forked from it: start this "
                'process with multiprocessing.get_context("spawn") and load the model in it'
            )

    def _post(self, command: _Add | _Abort | _Call | _Pause) -> None:
        self._check_process()
        with self._changed:
            if self.error is None:
                self._inbox.append(command)
                self._changed.notify()
                self._engine.wake()
                return
        if not isinstance(command, _Abort):
            raise self._death()

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._read_inbox():
                if self._has_work():
                    self._step()
                if self._draining and not self._engine.has_unfinished_requests():
                    self._paused = True
                    self._end_drain()
        except BaseException as error:  # of any kind: all waiters must get it
            cause = error
        with self._changed:
            text = "the engine was shut down" if cause is None else f"the engine failed: {cause!r}"
            self.error = EngineDeadError(text)
            self.error.__cause__ = cause
            commands = [*self._taken, *self._inbox]
            waiting = [*self._streams.values(), *(w.stream for w in commands if isinstance(w, _Add))]
            waiting += self._held
            calls = [command.done for command in commands if isinstance(command, (_Call, _Pause))]
            calls += self._draining
            names = list(self._streams)
            self._taken.clear()
            self._inbox.clear()
            self._streams.clear()
            self._held.clear()
        self._send((stream, self._death()) for stream in waiting)
        if cause is None:
            self._engine.abort_request(names)
        else:
            logger.error("the engine failed", exc_info=cause)
        for done in calls:
            if done.running() or (not done.done() and done.set_running_or_notify_cancel()):
                done.set_exception(self._death())
        self.ended.set_result(None)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except StepFailedError as failure:
            logger.error("%s; %d requests have ended", failure, len(failure.request_ids), exc_info=failure)
            streams = [self._streams.pop(name, None) for name in failure.request_ids]
            self._send((stream, failure.copy()) for stream in streams if stream is not None)
        else:
            self._hand_out(outputs)

    def _death(self) -> EngineDeadError:
        """Returns an error of its own for each waiter, as every raise adds to the traceback."""
        assert self.error is not None
        error = EngineDeadError(*self.error.args)
        error.__cause__ = self.error.__cause__
        return error

    def _read_inbox(self) -> bool:
        """Executes the commands of the inbox; waits for one if there is nothing to compute. False: stop."""
        with self._changed:
            while not (self._stopping or self._failure or self._inbox or self._has_work()):
                self._changed.wait()
            if self._stopping:
                return False
            if self._failure is not None:
                raise self._failure
            self._taken, self._inbox = self._inbox, deque()
        while self._taken:
            self._execute(self._taken[0])
            self._taken.popleft()
        return True

    def _execute(self, command: _Add | _Abort | _Call | _Pause) -> None:
        if isinstance(command, _Add):
            self._add(command)
        elif isinstance(command, _Call):
            _do(command)
        elif isinstance(command, _Pause):
            self._pause(command)
        elif self._drop_held(command):
            pass
        elif command.stream is None or self._streams.get(command.request_id) is command.stream:
            self._hand_out(self._engine.abort_request(command.request_id))
            if not self._engine.aborts_later:
                self._streams.pop(command.request_id, None)  # a pooling request has no last output

    def _has_work(self) -> bool:
        return not self._paused and self._engine.has_unfinished_requests()

    def _pause(self, command: _Pause) -> None:
        if command.mode == "abort":
            self._hand_out(self._engine.abort_request(list(self._streams)))
        if command.mode == "wait" and self._has_work():
            self._draining.append(command.done)
            return
        self._paused = True
        self._end_drain()
        _set(command.done)

    def _end_drain(self) -> None:
        draining, self._draining = self._draining, []
        for done in draining:
            _set(done)
        held, self._held = self._held, {}
        for command in held.values():
            self._add(command)

    def _drop_held(self, command: _Abort) -> bool:
        """Drops a request that waits for the end of a pause; False if there is none."""
        for stream, held in self._held.items():
            name = held.request.request_id
            if name == command.request_id and command.stream in (None, stream):
                del self._held[stream]
                if command.stream is None:
                    self._send([(stream, RequestAbortedError(f"the request {name!r} was aborted"))])
                return True
        return False

    def _add(self, command: _Add) -> None:
        if self._draining:
            self._held[command.stream] = command
            return
        try:
            with PANICS_AS_ERRORS:
                self._engine.add_request(command.request)
        except Exception as error:
            self._send([(command.stream, error)])
        else:
            self._streams[command.request.request_id] = command.stream

    def _hand_out(self, outputs: Iterable[Any]) -> None:
        ready = []
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                ready.append((stream, output.error if isinstance(output, FailedOutput) else output))
                if output.finished:
                    del self._streams[output.request_id]
        self._send(ready)

    def _send(self, ready: Iterable[tuple[OutputStream, Any]]) -> None:
        """Delivers outputs; wakes each event loop once, whatever the number of its coroutines."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Any]]] = {}
        for stream, output in ready:
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, outputs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, outputs)
            except RuntimeError:  # the loop is closed, and its coroutines are gone
                self._abort_streams([stream for stream, _ in outputs])

    def _abort_streams(self, streams: list[OutputStream]) -> None:
        names = [name for name, stream in self._streams.items() if stream in streams]
        for name in names:
            del self._streams[name]
        self._engine.abort_request(names)


def _set(done: Future[None]) -> None:
    if done.set_running_or_notify_cancel():
        done.set_result(None)


def _do(call: _Call) -> None:
    if not call.done.set_running_or_notify_cancel():
        return
    try:
        with PANICS_AS_ERRORS:
            result = call.work()
    except Exception as error:
        call.done.set_exception(error)
    else:
        call.done.set_result(result)


def _put_all(outputs: list[tuple[OutputStream, Any]]) -> None:
    for stream, output in outputs:
        stream.put(output)
