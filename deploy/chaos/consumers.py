"""Shell. Consumer processes of one consumer group: started, killed, stopped for a while, started again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from qmq.deploy.chaos.history import Fault, History
from qmq.deploy.processes import ROOT

GROUP = "g"


class Consumers:
    """Owned by one run; its nemesis thread strikes consumers, never the last one."""

    def __init__(
        self, folder: Path, count: int, *, metaserver: str, token: str, subjects: list[str], lease_s: float = 2.0
    ) -> None:
        folder.mkdir()
        self._folder, self._count, self._lease_s = folder, count, lease_s
        self._arguments = ["--metaserver", metaserver, "--group", GROUP]
        self._environ = os.environ | {"QMQ_TOKEN": token}
        self._arguments += ["--subjects", ",".join(subjects)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._made = 0
        self.faults: list[Fault] = []

    def start(self, name: str) -> None:
        command = [
            sys.executable,
            "-m",
            "qmq.deploy.chaos.consumer_process",
            "--id",
            name,
            "--journal",
            self._journal(name),
        ]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*command, "--journal", self._journal(name), *self._arguments],
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start_all(self) -> None:
        for _ in range(self._count):
            self._made += 1
            self.start(f"c{self._made}")

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()
        del self._processes[name]

    def strike(self, rng: random.Random, stop: threading.Event) -> None:
        """Until `stop`: kill a consumer and bring it back or let another come, or hold one still past its lease."""
        while not stop.wait(rng.uniform(0.5, 3.0)):
            name = rng.choice(sorted(self._processes))
            process, begin = self._processes[name], time.monotonic()
            kind = rng.choice(["killed, comes back", "killed, another comes", "stands still"])
            if kind == "stands still":
                process.send_signal(signal.SIGSTOP)
                stop.wait(rng.uniform(0.2, 2 * self._lease_s))
                process.send_signal(signal.SIGCONT)
            else:
                process.kill()
                process.wait()
                stop.wait(rng.uniform(0, 1.5 * self._lease_s))
                if kind == "killed, another comes":
                    del self._processes[name]
                    self._made += 1
                    name = f"c{self._made}"
                self.start(name)
            self.faults.append(Fault(f"consumer {kind}", "", begin, time.monotonic() + self._lease_s))

    def end(self, *, timeout_s: float = 60.0) -> None:
        """Ask all to finish; afterwards none runs."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def failed(self) -> str:
        """The log of a consumer that ended by itself, empty if none did."""
        for name, process in self._processes.items():
            if process.poll() not in (None, 0):
                return f"{name} ended with {process.poll()}:\n" + (self._folder / f"{name}.log").read_text()[-3000:]
        return ""

    def read(self, history: History) -> None:
        """Add what all consumers wrote down."""
        for journal in sorted(self._folder.glob("*.journal")):
            with journal.open() as lines:
                history.read_consumer(lines)

    def delivered_ids(self) -> set[str]:
        """Ids of all messages that any consumer was given so far."""
        history = History()
        self.read(history)
        return {one.id for one in history.delivered}

    def _journal(self, name: str) -> str:
        return str(self._folder / f"{name}.journal")
