"""Shell. One process of a local cluster: started with its log, stopped within a bound, restarted when it has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qmq
from qmq.errors import NotServed

TERM_S = 10.0
"""Time between the request to end and SIGKILL."""
SUSPEND_S = 60.0
STOPPED = frozenset("TtZX")
ROOT = Path(qmq.__file__).parents[1]


def module_command(module: str, config: Path) -> list[str]:
    """Return the command of one of our modules."""
    return [sys.executable, "-m", module, "--config", str(config)]


def prometheus_command(config: Path, data: Path, port: int) -> list[str]:
    """Return the command of a Prometheus for this machine alone; raise NotServed if it is not installed."""
    if not (program := shutil.which("prometheus")):
        raise NotServed("prometheus is not installed (Debian: apt-get install prometheus)")
    return [
        program,
        "--config.file",
        str(config),
        "--storage.tsdb.path",
        str(data),
        "--web.listen-address",
        f"127.0.0.1:{port}",
        "--log.level",
        "warn",
    ]


@dataclass
class Service:
    """One process of the cluster. Owned by one `Cluster`."""

    name: str
    command: Sequence[str]
    """Contains a file of the cluster's directory, which identifies the process after its runner is gone."""
    log: Path
    is_held: bool = False
    """Whether it stays down until it is started explicitly."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    launch: Callable[..., Any] = subprocess.Popen
    """Starts the command; tests fork a process that has imported the program."""
    starts: int = 0
    ended_at: float | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int | None:
        """Id of the running process, or None while it is down."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_status(self) -> int | None:
        """Last exit status, or None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start the process in a session of its own: Ctrl-C reaches only the runner, which stops all in order."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = self.launch(
                self.command,
                cwd=ROOT,
                env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        self.ended_at = None

    def keep_alive(self, now: float, restart_s: float) -> str:
        """Note an end of the process, and restart it after `restart_s`; return a line about that, or ""."""
        if self.is_held or self._process is None or (status := self._process.poll()) is None:
            return ""
        if self.ended_at is None:
            self.ended_at = now
            return f"{self.name} (pid {self._process.pid}) ended with status {status}; see {self.log}"
        if now - self.ended_at < restart_s:
            return ""
        self.start()
        return f"{self.name} is started again (pid {self._process.pid})"

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the process with SIGKILL and wait for that, also during a restart."""
        while (process := self._process) is not None and process.poll() is None:
            process.kill()
            process.wait()

    def stop(self, deadline: float) -> None:
        """Wait for the requested end of the process until `deadline` (of `time.monotonic`), then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of its log."""
        text = self.log.read_bytes()[-8192:].decode("utf-8", "replace") if self.log.exists() else ""
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (it wrote nothing)"


def stop_all(services: list[Service]) -> None:
    """Send SIGTERM to all services at once, then wait for each within one bound."""
    for service in services:
        service.signal(signal.SIGTERM)
    deadline = time.monotonic() + TERM_S
    for service in services:
        service.stop(deadline)


def suspend(pid: int) -> None:
    """Stop a process with SIGSTOP and wait until none of its threads runs; an ended one counts as stopped.

    `kill` returns earlier: on a busy machine the other threads run on and confirm frames until one takes the signal.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + SUSPEND_S
    while not _thread_states(pid) <= STOPPED:
        if time.monotonic() > deadline:
            raise NotServed(f"process {pid} does not stop")
        time.sleep(0.005)


def _thread_states(pid: int) -> set[str]:
    """Return the states of all threads, from /proc/…/stat after the name, which may contain anything."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended
            states.add(stat.read_text().rpartition(") ")[2][:1])
    return states


def is_ours(pid: int, run_dir: Path) -> bool:
    """Return whether `pid` is a process of the cluster in `run_dir`, by its command line, as pids are reused."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(argument.startswith(os.fsencode(run_dir) + b"/") for argument in command)


def end_leftovers(pids: list[int], run_dir: Path) -> list[int]:
    """End processes that outlived a killed runner; return their ids."""
    left = [pid for pid in pids if is_ours(pid, run_dir)]
    for number, bound_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        for pid in left:
            if is_ours(pid, run_dir):
                os.kill(pid, number)
        deadline = time.monotonic() + bound_s
        while any(is_ours(pid, run_dir) for pid in left) and time.monotonic() < deadline:
            time.sleep(0.05)
    return left
