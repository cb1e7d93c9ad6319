"""Rendering of chat templates in a child process, which bounds their time, memory and output.

A template comes with a checkpoint.  Jinja's sandbox keeps it from calling functions, but not from looping or
from writing without an end, and a thread that does so cannot be stopped.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from torch_armllm.engine.text import template_worker

SECONDS = 5
"""Time that a template may take."""
MEMORY = 512 << 20
"""Bytes that a template may take."""
CHARACTERS = 1 << 24
"""Characters that a template may write."""
_START = 120.0
"""Seconds that the process may take to start."""


class TemplateError(Exception):
    """A template's own error: its type and message."""


class TemplateBoundError(ValueError):
    """A template took more time, memory or characters than it may."""


class TemplateProcess:
    """A child process that renders one template at a time; it starts when it is needed.

    Args:
        seconds: that a template may take.
        memory: bytes that a template may take.
        characters: that a template may write.
    """

    def __init__(self, seconds: int = SECONDS, memory: int = MEMORY, characters: int = CHARACTERS) -> None:
        self._seconds, self._memory, self._characters = seconds, memory, characters
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._owner = os.getpid()

    def render(self, **request: Any) -> str:
        """Renders a template.

        Args:
            request: arguments of `transformers.utils.chat_template_utils.render_jinja_template`, for one
                conversation.

        Raises:
            TemplateBoundError: the template exceeds a bound.
            ValueError: the template raised a ValueError, or the conversation holds what JSON cannot.
            TemplateError: the template raised an error.
            RuntimeError: the process does not start.
        """
        request = json.loads(json.dumps(request, default=_plain))
        with self._lock:
            connection = self._started()
            try:
                connection.settimeout(self._seconds + 1)  # the process ends itself before
                template_worker.send(connection, request)
                answer = template_worker.receive(connection)
            except (OSError, EOFError):
                status = self._stop()
                raise TemplateBoundError(
                    f"the chat template did not render within {self._seconds} s"
                    if status in (-14, -9)  # by SIGALRM, or by `_stop`
                    else f"the chat template ended the process that renders it, with status {status}"
                ) from None
            except BaseException:  # Ctrl-C: the answer would be taken for that of the next request
                self._stop()
                raise
        if "text" in answer:
            return str(answer["text"])
        if "size" in answer:
            raise TemplateBoundError(
                f"the chat template wrote {answer['size']} characters; at most {self._characters} are allowed"
            )
        if "memory" in answer:
            raise TemplateBoundError(f"the chat template takes more than {self._memory >> 20} MiB of memory")
        kind = ValueError if answer["error"] == "ValueError" else TemplateError
        raise kind(answer["message"])

    def start(self) -> None:
        """Starts the process now, so that the first template does not wait for it.

        Raises:
            RuntimeError: the process does not start.
        """
        with self._lock:
            self._started()

    def close(self) -> None:
        """Ends the process; the next template starts another one."""
        with self._lock:
            self._stop()

    def _started(self) -> socket.socket:
        if self._owner != os.getpid():  # forked: the connection is the parent's
            self._owner, self._child, self._connection = os.getpid(), None, None
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        bounds = map(str, (self._seconds, self._memory, self._characters))
        try:
            self._child = subprocess.Popen(
                [sys.executable, template_worker.__file__, *bounds],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "USE_TORCH": "0"},
            )
        except OSError as error:
            ours.close()
            raise RuntimeError(f"no process can be started to render chat templates: {error}") from error
        finally:
            theirs.close()
        self._connection = ours
        try:
            ours.settimeout(_START)
            template_worker.receive(ours)
        except (OSError, EOFError):
            status = self._stop()
            raise RuntimeError(
                f"the process that renders chat templates did not start: status {status}"
            ) from None
        return ours

    def _stop(self) -> int | None:
        """Ends the process, and returns its status."""
        if self._connection is not None:
            self._connection.close()
        child, self._child, self._connection = self._child, None, None
        if child is None:
            return None
        try:
            return child.wait(0.5)  # it ends when the connection closes, unless it renders
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def _plain(value: Any) -> Any:
    """Converts an object of a message for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise ValueError(
        f"a message, a tool or a variable of the template holds {type(value).__name__}: give strings, "
        "numbers, lists and dictionaries"
    )


SHARED = TemplateProcess()
"""The process of all models."""
atexit.register(SHARED.close)
