r"""Python processes that begin as copies of one which has imported what they will import.

    python -m tests.support.warm_processes SOCKET

Importing, and exporting a tiny model, is most of the work of a process that computes a little. The program
forks for each request that comes over the socket, whose descriptor it gets; a copy then runs as ``python -m``
or ``python -c`` would.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_MODULES = (
    "torch._dynamo",
    "torch.export",
    "torch_armllm.cli.main",
    "torch_armllm.llm.ranks.rank_process",
    "torch_armllm.llm.replicas.replica_process",
    "transformers.models.llama.modeling_llama",
)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_MOST_BYTES = 1 << 17
_MOST_FILES = 32
_PR_SET_CHILD_SUBREAPER = 36
_START = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class _Request(NamedTuple):
    """A process to start: its arguments, those of the interpreter included, and what it inherits."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    cpus: set[int]
    numbers: list[int]
    """The descriptors that the process is to have."""


class WarmPopen(subprocess.Popen[Any]):
    """A `Popen` that begins ``[sys.executable, "-m" or "-c", ...]`` as a copy, and everything else anew."""

    def _execute_child(self, *arguments: Any) -> None:
        given = _START.bind(self, *arguments).arguments
        command = given["args"]
        is_python = list(command[:1]) == [sys.executable] and command[1] in ("-m", "-c")
        if not is_python or given["preexec_fn"] is not None or given["start_new_session"]:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pipes = [given[name] for name in _PIPES]
        own = (max(number, file) for number, file in enumerate((pipes[0], pipes[3], pipes[5])))
        files = dict(zip([0, 1, 2, *given["pass_fds"]], [*own, *given["pass_fds"]], strict=True))
        environment = dict(os.environ if given["env"] is None else given["env"])
        folder, cpus = os.fspath(given["cwd"] or os.getcwd()), os.sched_getaffinity(0)
        request = _Request([str(each) for each in command[1:]], folder, environment, cpus, list(files))
        self.pid = _origin().start(request, list(files.values()))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Origin:
    """The process that others are copies of."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            self._process = _COLD(command, cwd=_ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._lock = threading.Lock()

    def start(self, request: _Request, files: list[int]) -> int:
        """Returns the number of a new process, which is a child of this one."""
        with self._lock, _adopting():
            socket.send_fds(self._socket, [pickle.dumps(request)], files)
            answer = self._socket.recv(8)
        if not answer:
            raise RuntimeError(f"the process that others are copies of ended with {self._process.wait()}")
        return int.from_bytes(answer, "little")


_COLD = subprocess.Popen


@functools.cache
def _origin() -> _Origin:
    return _Origin()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of grandchildren whose parents end."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _next_copy(connection: socket.socket) -> tuple[_Request, list[int]]:
    """Forks for each request; returns in a copy, with its request and the files that came with it."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not data:
            os._exit(0)
        read, write = os.pipe()
        if (middle := os.fork()) == 0:
            parent = os.getpid()
            if (copy := os.fork()) == 0:
                for each in (read, write, connection.detach()):
                    os.close(each)
                while os.getppid() == parent:
                    time.sleep(0.001)
                return pickle.loads(data), files
            os.write(write, copy.to_bytes(8, "little"))
            os._exit(0)  # the copy gets the process that asked as its parent
        os.waitpid(middle, 0)
        connection.send(os.read(read, 8))
        for each in (read, write, *files):
            os.close(each)


def _take_over(request: _Request, files: list[int]) -> None:
    """Gives this process the descriptors, environment, folder, CPUs and arguments of a request."""
    above = max(request.numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, request.numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cpus)
    kind, program, *arguments = request.arguments
    sys.argv = [kind, *arguments]
    Path("/proc/self/comm").write_text(program.rpartition(".")[2][:15])


def _keep_graphs() -> None:
    """Lets copies read the graphs that this process's parent has exported, as the tests do."""
    from tests.support.captured_graphs import KeptGraphs
    from tests.support.graph_folder import graph_folder
    from torch_armllm.capture import export

    kept = KeptGraphs(export._exported, export._exported_with_own_attention, graph_folder())
    export._exported, export._exported_with_own_attention = kept.exported, kept.with_own_attention


def main() -> None:
    """Imports, waits for requests, and runs the program of each in a copy."""
    for module in _MODULES:
        importlib.import_module(module)
    _keep_graphs()
    gc.collect()
    gc.freeze()
    request, files = _next_copy(socket.socket(fileno=int(sys.argv[1])))
    _take_over(request, files)
    kind, program, *_ = request.arguments
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    main()
