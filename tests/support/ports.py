"""Shell. Ports for the servers of tests, from a block that no other test process has at the same time.

The block excludes the ports of outgoing connections: another process may take one of these before the server starts.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import IO

from qmq.deploy.plan import is_free

BLOCKS = range(21_500, 32_500, 1000)
"""Above the ports of docs/install.md, below those of outgoing connections."""
RUN = 50
"""Ports of the largest test cluster."""


class Block:
    """Ports of this process, for its lifetime."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir(), f"qmq-test-ports-{os.getuid()}")
        folder.mkdir(exist_ok=True)
        self._lock, first = self._claim(folder)
        self._ports = cycle(range(first, first + BLOCKS.step))
        self._kept: set[int] = set()

    @staticmethod
    def _claim(folder: Path) -> tuple[IO[bytes], int]:
        for first in BLOCKS:
            file = open(folder / str(first), "ab")  # the claim, released when the process ends
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file, first
            except BlockingIOError:
                file.close()
        raise RuntimeError(f"{len(BLOCKS)} processes of tests run already, each with {BLOCKS.step} ports")

    def take(self, count: int) -> list[int]:
        """Return free ports; a port repeats only after all others."""
        free = (port for port in islice(self._ports, BLOCKS.step) if port not in self._kept and is_free(port))
        ports = list(islice(free, count))
        if len(ports) < count:
            raise RuntimeError(f"{len(ports)} of {BLOCKS.step} ports are free, {count} are needed")
        return ports

    def keep(self) -> int:
        """Return a port that is never returned again, for a server that restarts."""
        [port] = self.take(1)
        self._kept.add(port)
        return port

    def take_run(self) -> int:
        """Return the first of `RUN` consecutive ports; a cluster picks the free ones."""
        while (next(self._ports) - BLOCKS.start) % RUN != RUN - 1:
            pass
        run = list(islice(self._ports, RUN))
        while not self._kept.isdisjoint(run):
            run = list(islice(self._ports, RUN))
        return run[0]


block = cache(Block)


def free_ports(count: int) -> list[int]:
    return block().take(count)


def kept_port() -> int:
    return block().keep()


def run_of_ports() -> int:
    return block().take_run()
