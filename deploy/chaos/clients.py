"""Shell. Clients of a trial: their workload, the records they write, and their processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from zlib import crc32

import qmq
from qmq.deploy.chaos.history import History
from qmq.deploy.chaos.records import KILLED, LEFT, OF_CONSUMERS, Gone, Record, Window, line_of, records_of
from qmq.deploy.processes import ROOT

PLAIN, KEYED = "order.changed", "seat.booked"
"""Subjects; in the second one, nearly all messages have an order key."""
TAGS = ["red", "green", "blue"]
RETRY_DELAY_S = 0.3
"""Delay of a retry after a handler failed."""


class Member(NamedTuple):
    """A consumer's place in a group: a listener with this many handlers; 0: a puller."""

    subject: str
    group: str
    concurrency: int
    tags: list[str]


ALL = Member(PLAIN, "all", 1, [])
SEATS = Member(KEYED, "seats", 16, [])
RED = Member(PLAIN, "red", 4, ["red"])

CONSUMERS: dict[str, list[Member]] = {
    "c1": [ALL, SEATS],
    "c2": [ALL, SEATS._replace(concurrency=1)],
    "c3": [ALL._replace(concurrency=0), SEATS._replace(concurrency=0)],
    "c4": [ALL._replace(concurrency=0), RED],
    "c5": [RED._replace(concurrency=0), SEATS],
}
"""Processes and their memberships. Every group has at least two."""
PRODUCERS = ("p1", "p2", "p3")

FAULTS = (
    "kill master",
    "swap roles",
    "kill slave",
    "lose the master's disk",
    "stop master",
    "kill during a swap",
    "kill both",
    "stop slave",
    "replace broker",
    "kill master",
    "swap roles",
    "kill in any order",
)
"""Faults of a trial with a fixed order; they begin anew until everything is sent."""
ROLE_CHANGES = ("swap roles", "kill master")
"""The faults with more than two copies; each follows the one before at once."""


class Journal:
    """A process' own file of records, without a buffer: a written record survives a kill, as the kernel has it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *records: Record) -> None:
        self.write_all(records)

    def write_all(self, records: Iterable[Record]) -> None:
        data = "".join(map(line_of, records)).encode()
        while data:
            data = data[os.write(self._file, data) :]

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def now() -> float:
    """Return the time of CLOCK_MONOTONIC. Microseconds are enough, and short."""
    return round(time.monotonic(), 6)


def content_of(message: qmq.Message) -> int:
    """Return the checksum of the fields that a consumer must receive unchanged."""
    fields = str(message["n"]), message["x"], message.order_key, sorted(message.tags), message.retries_max
    return crc32(repr(fields).encode())


SEND_S = 60.0
"""Time that a producer has for the outcome of a message, as long as its group is readonly."""
END_S = SEND_S + 60.0
"""Time that a client has to end after SIGTERM: its last outcome and its drain, on a machine that pauses."""
KINDS = ("vanishes", "vanishes for longer", "stands still", "leaves")


class Clients:
    """Client processes of one trial. `folder` has their logs, their journals, and the journal of their faults."""

    def __init__(self, folder: Path, *, metaserver: str, token: str, seed: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._metaserver = metaserver
        self._seed = seed
        self._environ = os.environ | {"QMQ_TOKEN": token}
        self._lives = dict.fromkeys(CONSUMERS, 0)
        self._producers: dict[str, subprocess.Popen[bytes]] = {}
        self._consumers: dict[str, subprocess.Popen[bytes]] = {}
        """Consumer processes that should run."""
        self._journal = Journal(folder / "clients.journal")
        self.struck: list[str] = []

    def start_producers(self, *, messages: int, rate: float, keys: int) -> None:
        share = messages // len(PRODUCERS)
        for at, name in enumerate(PRODUCERS):
            count = share if at else messages - share * (len(PRODUCERS) - 1)
            options = {"count": count, "rate": rate / len(PRODUCERS), "keys": keys // len(PRODUCERS), "send_s": SEND_S}
            self._producers[name] = self._start("producer", name, name, options)

    def start_consumers(self) -> None:
        for name in CONSUMERS:
            self._start_consumer(name)

    def have_begun(self) -> bool:
        """Return whether every client has its journal; producers handle SIGTERM by then."""
        lives = [*map(self._life, self._consumers), *self._producers]
        return all((self._folder / f"{life}.journal").exists() for life in lives)

    def _start_consumer(self, name: str) -> None:
        self._lives[name] += 1
        life = self._life(name)
        self._consumers[name] = self._start("consumer", name, life, {"life": life, "members": CONSUMERS[name]})

    def _life(self, name: str) -> str:
        return f"{name}.{self._lives[name]}"

    def _start(self, kind: str, name: str, file: str, options: dict[str, Any]) -> subprocess.Popen[bytes]:
        options |= {
            "name": name,
            "seed": f"{self._seed} {file}",
            "metaserver": self._metaserver,
            "journal": str(self._folder / f"{file}.journal"),
        }
        with (self._folder / f"{file}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"qmq.deploy.chaos.{kind}_process", json.dumps(options)],
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    # Faults of consumers.

    def strike(self, rng: random.Random, stop: threading.Event, lease_s: float) -> None:
        """Inject faults of consumers until `stop`: kill and restart them, pause them for longer than their lease, let
        them leave and rejoin.
        """
        while not stop.wait(rng.uniform(0.5, 3.0)):
            name, kind = rng.choice(sorted(CONSUMERS)), KINDS[len(self.struck) % len(KINDS)]
            process, life = self._consumers[name], self._life(name)
            if process.poll() is not None:
                return  # `failed` reports it
            self.struck.append(kind)
            begin = now()
            if kind == "stands still":
                process.send_signal(signal.SIGSTOP)
                stop.wait(rng.uniform(0.2, 2 * lease_s))
                process.send_signal(signal.SIGCONT)
                self._journal.write(Window(begin, now(), f"{OF_CONSUMERS}{kind}", ""))
                continue
            del self._consumers[name]  # its end is no failure
            if kind == "leaves":
                self._leave(process, life)
            else:
                self._journal.write(Gone(now(), life, KILLED))
                process.kill()
            _wait_or_kill(process)
            stop.wait(rng.uniform(lease_s, 2 * lease_s) if kind == "vanishes for longer" else rng.uniform(0, 0.5))
            self._start_consumer(name)
            self._journal.write(Window(begin, now(), f"{OF_CONSUMERS}{kind}", ""))

    def _leave(self, process: subprocess.Popen[bytes], life: str) -> None:
        self._journal.write(Gone(now(), life, LEFT))
        process.terminate()

    # Ends.

    def stop_sending(self) -> None:
        """Stop producers; return once every outcome is in their journals."""
        for process in self._producers.values():
            process.terminate()
        for process in self._producers.values():
            _wait_or_kill(process)

    @property
    def is_sending(self) -> bool:
        return any(process.poll() is None for process in self._producers.values())

    def failed(self) -> str:
        """Return the end of the log of a process that failed; empty if none did."""
        lives = {self._life(name): process for name, process in list(self._consumers.items())}
        for name, process in (self._producers | lives).items():
            if process.poll() not in (None, 0):
                log = (self._folder / f"{name}.log").read_text()
                return f"{name} ended with {process.poll()}:\n{log[-3000:]}"
        return ""

    def leave(self) -> None:
        """Let all consumers leave, and wait for that."""
        for name, process in self._consumers.items():
            self._leave(process, self._life(name))
        for process in self._consumers.values():
            _wait_or_kill(process)

    def kill(self) -> None:
        """Kill all processes, and wait for their end."""
        for process in (self._producers | self._consumers).values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def note(self, records: Iterable[Record]) -> None:
        """Add records of the trial itself."""
        self._journal.write_all(records)


def history_in(folder: Path) -> History:
    """Return the history in all journals so far."""
    history = History()
    for path in sorted(folder.glob("*.journal")):
        with path.open() as lines:
            history.read(records_of(lines))
    return history


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended; kill one that does not end on request, as a service manager does."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
