"""Shell. Programs of a cluster for tests, begun by a fork of a process that has imported them once.

What a metaserver imports takes two seconds of a core, more than most tests of one. What begins like this is still a
process of its own and a child of the test's: with its own id, files, environment, command line and end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAMS = frozenset({"qmq.broker", "qmq.metaserver", "qmq.delayserver", "qmq.watchdog"})
READ_BY_IMPORTS = ("GRPC_", "LD_", "PYTHON", "FAKETIME", "MALLOC_", "COVERAGE_")
"""Variables that imports read: a program that is to have others than the tests' own starts from nothing."""
ROOM = "-" * 4096
"""An argument of the ready process, which a fork's command line is written over."""
ORDER_BYTES_MAX = 1 << 20
PR_SET_CHILD_SUBREAPER = 36


class ReadyPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, but `python -m PROGRAM …` is forked from a process that has imported PROGRAM."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *fds = more[:13]
        session = more[-2]
        if preexec_fn or executable or pass_fds or shell or not (program := _program(args, env)):
            super()._execute_child(args, executable, preexec_fn, *more)  # type: ignore[misc]
            return
        ours = [fd if fd >= 0 else number for number, fd in enumerate((fds[0], fds[3], fds[5]))]
        order = {
            "arguments": [os.fspath(word) for word in args],
            "cwd": os.fspath(cwd or os.getcwd()),
            "environ": dict(os.environ if env is None else env),
            "session": bool(session),
        }
        self.pid = _ready(program).fork(order, ours)
        self._child_created = True
        self._close_pipe_fds(*fds)  # type: ignore[attr-defined]


def _program(args: Any, env: Mapping[str, str] | None) -> str:
    """The program of `PROGRAMS` that a command begins; empty: it begins another, or in a world of its own."""
    if not isinstance(args, list | tuple) or list(args[:2]) != [sys.executable, "-m"] or args[2] not in PROGRAMS:
        return ""
    return args[2] if _read_by_imports(os.environ if env is None else env) == _AT_FIRST else ""


def _read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_BY_IMPORTS)}


_AT_FIRST = _read_by_imports(os.environ)


class Ready:
    """A process that has imported a program; the test's process talks with it."""

    def __init__(self, program: str) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.zygote", program, str(its.fileno()), ROOM]
        self._process = subprocess.Popen(
            command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        its.close()
        self._socket = ours

    def fork(self, order: dict[str, Any], fds: list[int]) -> int:
        """Begin a process with these standard files; returns its id, and it is our child."""
        with _LOCK, _adopting():
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            return int(self._socket.recv(32))


_LOCK = threading.RLock()
_ALL: dict[str, Ready] = {}


def _ready(program: str) -> Ready:
    with _LOCK:
        if program not in _ALL:
            _ALL[program] = Ready(program)
        return _ALL[program]


@contextlib.contextmanager
def _adopting() -> Any:
    """While it lasts, whom a descendant of ours leaves without a parent becomes our child."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def main(program: str, end: socket.socket) -> None:
    """Import `program`, then fork for each order; returns in each child when the program has, and after the tests."""
    _import(program)
    while True:
        data, fds, _, _ = socket.recv_fds(end, ORDER_BYTES_MAX, 3)
        if not data:
            return
        if (pid := _fork_orphan()) == 0:
            end.close()
            _become(json.loads(data), fds)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            return
        for fd in fds:
            os.close(fd)
        end.send(str(pid).encode())


def _import(program: str) -> None:
    """A program without settings refuses to run, and has imported all by then."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing), contextlib.suppress(SystemExit):
        sys.argv = [program]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _fork_orphan() -> int:
    """A fork whose parent ends at once, so that it is adopted; returns its id, and 0 in it."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        if (pid := os.fork()) == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.close(writing)
    with os.fdopen(reading) as file:
        return int(file.read())


def _become(order: dict[str, Any], fds: list[int]) -> None:
    if order["session"]:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    words = order["arguments"]
    sys.argv = words[2:]
    _show(words)


def _show(words: list[str]) -> None:
    """Write the command over this process' own, for `ps`, and for who knows a process by its command."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
