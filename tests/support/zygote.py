"""Shell. Programs for tests, forked from a process that has imported them.

The imports of a metaserver take 1.2 s of a core, those of a broker 0.5 s. A forked program is a child of the test
with its own id, files, environment, command line and exit status.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PROGRAMS = frozenset({"qmq.broker", "qmq.metaserver", "qmq.delayserver", "qmq.watchdog"})
READ_BY_IMPORTS = ("GRPC_", "LD_", "PYTHON", "FAKETIME", "MALLOC_", "COVERAGE_")
"""Prefixes of variables that imports read; a program with other values of these is not forked."""
COMMAND_SPACE = "-" * 4096
"""Argument of the ready process, overwritten by a fork's command line."""
ORDER_BYTES_MAX = 1 << 20
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.005


def launch(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdin: int,
    stdout: IO[bytes],
    stderr: IO[bytes],
    start_new_session: bool,
) -> Any:
    """Start `command` like `subprocess.Popen`, by a fork for `python -m PROGRAM …`."""
    is_program = list(command[:2]) == [sys.executable, "-m"] and command[2] in PROGRAMS
    if not is_program or _read_by_imports(env) != _AT_START:
        options: dict[str, Any] = {"cwd": cwd, "env": env, "stdin": stdin, "stdout": stdout, "stderr": stderr}
        return subprocess.Popen(command, start_new_session=start_new_session, **options)
    order = {
        "arguments": [os.fspath(word) for word in command],
        "cwd": os.fspath(cwd),
        "environ": dict(env),
        "session": start_new_session,
    }
    with open(os.devnull, "rb") as nothing:
        files = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
        return ForkedProcess(command, _ready(command[2]).fork(order, files))


def _read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_BY_IMPORTS)}


_AT_START = _read_by_imports(os.environ)


class ForkedProcess:
    """Child process with the methods of `subprocess.Popen` that `Service` calls, from any thread."""

    def __init__(self, command: Sequence[str], pid: int) -> None:
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, or raise `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


class Ready:
    """Process that has imported a program and forks it on order."""

    def __init__(self, program: str) -> None:
        self._socket, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.zygote", program, str(far_end.fileno()), COMMAND_SPACE]
        with far_end:
            fds = [far_end.fileno()]
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)

    def fork(self, order: dict[str, Any], files: list[int]) -> int:
        """Start a process with these standard files; return the id of this child."""
        with _LOCK, _adopting():
            socket.send_fds(self._socket, [json.dumps(order).encode()], files)
            return int(self._socket.recv(32))


_LOCK = threading.RLock()
_ALL: dict[str, Ready] = {}


def _ready(program: str) -> Ready:
    with _LOCK:
        if program not in _ALL:
            _ALL[program] = Ready(program)
        return _ALL[program]


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make orphaned descendants children of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def main(program: str, near_end: socket.socket) -> None:
    """Import `program` and fork it for each order; a fork returns from here when its program ends."""
    _import(program)
    while True:
        data, files, _, _ = socket.recv_fds(near_end, ORDER_BYTES_MAX, 3)
        if not data:
            return
        if (pid := _fork_orphan()) == 0:
            near_end.close()
            _become(json.loads(data), files)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            return
        for fd in files:
            os.close(fd)
        near_end.send(str(pid).encode())


def _import(program: str) -> None:
    """Run the program without settings: it imports everything, then refuses to start."""
    for name in [name for name in os.environ if name.startswith("QMQ_")]:
        del os.environ[name]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing), contextlib.suppress(SystemExit):
        sys.argv = [program]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _fork_orphan() -> int:
    """Fork twice, so that the test's process adopts the grandchild; return its id, or 0 in the grandchild."""
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


def _become(order: dict[str, Any], files: list[int]) -> None:
    if order["session"]:
        os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    words = order["arguments"]
    sys.argv = words[2:]
    _write_command_line(words)


def _write_command_line(words: list[str]) -> None:
    """Replace this process' command line, which `ps` and `is_ours` read."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
