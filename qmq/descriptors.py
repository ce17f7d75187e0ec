"""Shell. File descriptors of a process: its limit, the part of connections, spares for its files, listening sockets.

Each port has a bound for its connections. The bounds together leave a part of the limit for files, so a crowd without a
token takes no descriptor from a log. Other programs can still use up the machine's descriptors (ENFILE). Then a file is
opened with a spare one; without a spare, opening waits. A missing descriptor is overload, never a failed disk.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from asyncio.trsock import TransportSocket
from collections.abc import Callable
from typing import NamedTuple, TypeVar

log = logging.getLogger(__name__)

LIMIT_MAX = 1 << 20
"""Highest limit that is set; no process of qmq uses more. Some containers allow a billion, and programs that close all
descriptors then take minutes.
"""
FILES_PART = 4
"""One part in so many of the limit, up to FILES_MAX, is for files, databases and outgoing connections."""
FILES_MAX = 2048
SPARES = 8
WAIT_S = 0.02
LOG_EVERY_S = 10.0
SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of a process, or a machine, without a free descriptor."""

T = TypeVar("T")


def socket_family(host: str) -> socket.AddressFamily:
    """Return the family of a socket that listens on an IP address or `localhost`."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def raise_limit() -> None:
    """Raise the limit of this process as far as it may. Called once, at the start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # some systems allow less than the hard limit
            log.warning("descriptor limit stays at %d: %s", soft, error)


def limit() -> int:
    """Return the limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, LIMIT_MAX)


class Ports(NamedTuple):
    """Bounds of a process's connections, by port; 0 for a port that the process lacks."""

    clients: int
    sync: int = 0
    control: int = 0
    http: int = 0


SYNC_MAX, CONTROL_MAX, HTTP_MAX = 200, 1_000, 200
META_HTTP_MAX = 1_000
"""Bound of a metaserver's HTTP port, where clients without gRPC poll their routes every few seconds."""


def files_of(limit: int) -> int:
    """Return the descriptors that connections leave for the rest of the process."""
    return min(FILES_MAX, limit // FILES_PART)


def copy_ports(limit: int, clients_max: int) -> Ports:
    """Return the bounds of a broker or delay server.

    Args:
        clients_max: connections of clients that its settings allow.
    """
    sync, control, http = min(SYNC_MAX, limit // 16), min(CONTROL_MAX, limit // 8), min(HTTP_MAX, limit // 16)
    return Ports(min(clients_max, limit - files_of(limit) - sync - control - http), sync, control, http)


def meta_ports(limit: int, clients_max: int) -> Ports:
    """Return the bounds of a metaserver; its clients use gRPC."""
    http = min(META_HTTP_MAX, limit // 8)
    return Ports(min(clients_max, limit - files_of(limit) - http), http=http)


def watchdog_ports(limit: int) -> Ports:
    """Return the bounds of a watchdog, which has only an HTTP port."""
    return Ports(0, http=min(HTTP_MAX, limit // 8))


def report(ports: Ports, clients_max: int) -> None:
    """Log that the limit allows fewer connections than wanted."""
    if ports.clients < clients_max:
        log.warning(
            "file descriptors allow %d connections of clients instead of %d (limit %d): raise LimitNOFILE or ulimit -n",
            ports.clients,
            clients_max,
            limit(),
        )


class Spares:
    """Descriptors held in reserve by a process, for any of its threads."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._wanted = 0

    def hold(self) -> None:
        """Hold descriptors from now on."""
        self._wanted = SPARES
        self.fill()

    def fill(self) -> None:
        """Replace spares that files took, if the system has free descriptors again."""
        try:
            while len(self._held) < self._wanted:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in SHORTAGE:
                raise

    def give(self) -> bool:
        """Close a spare; return whether there was one."""
        try:
            os.close(self._held.pop())
        except IndexError:
            return False
        return True


spares: Spares = Spares()
"""Spares of this process; only brokers and delay servers hold any."""


def opening(call: Callable[[], T]) -> T:
    """Return the result of `call`, which opens a file. Without a free descriptor it takes a spare; without a spare it
    waits.

    The wait has no end: nothing was written, so nothing is undefined, and a restart would need descriptors, too.
    """
    logged_at = 0.0
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in SHORTAGE:
                raise
            if spares.give():
                log.error("no file descriptor is free, a file takes a spare one (limit %d): %s", limit(), error)
                continue
            if time.monotonic() >= logged_at + LOG_EVERY_S:
                logged_at = time.monotonic()
                log.critical("no file descriptor is free, waiting (limit %d): %s", limit(), error)
        time.sleep(WAIT_S)


async def close_server(server: asyncio.Server) -> None:
    """Close a listening server. Its connections stay; by then each has its protocol, which the caller closes."""
    await stop_accepting(*server.sockets)
    server.close()


async def stop_accepting(*listeners: socket.socket | TransportSocket) -> None:
    """Stop accepting, and wait until every accepted connection has its protocol.

    asyncio accepts a connection in three passes of the loop. If its server closes in the first one, Python 3.11 leaves
    the transport open, and its warning appears later, for instance in another test.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.SelectorEventLoop):  # uvloop has no such gap
        for listener in listeners:
            loop.remove_reader(listener)
    for _ in range(4):
        await asyncio.sleep(0)
