"""Replacements for parts of Python and the system in a world: clocks, dice, threads, gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc.aio
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, event

from qmq.client.batch import BatchLife
from qmq.client.session_life import SessionLife
from qmq.watchdog import database
from tests.simulation.loop import Killed, Threads, VirtualLoop, current
from tests.simulation.shells.network import Network
from tests.simulation.shells.rpc import Channel, RpcServer

SINCE_1970_S = 1_767_225_600.0
HTTP_PORT, GRPC_PORT = 8080, 8081
METASERVER_HOSTS = "10.0.0.1", "10.0.0.2"
"""Metaservers behind the common address."""


def _monotonic(loop: VirtualLoop) -> float:
    return loop.now_s


def _wall(loop: VirtualLoop) -> float:
    process = current()
    return SINCE_1970_S + loop.now_s + (process.clock_s if process is not None else 0.0)


def _spent(loop: VirtualLoop) -> float:
    process = current()
    return loop.now_s + (process.spent_s if process is not None else 0.0)


def _exit(status: int) -> None:
    process = current()
    if not process.is_dead:
        process.reason = sys.exc_info()[1]
        process.kill()
    raise Killed(status)


class Nothing:
    """Stands in for an HTTP port: this world has no metrics and pages."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return "", HTTP_PORT

    async def run(self) -> None:
        await asyncio.Event().wait()


async def _never() -> None:
    await Nothing().run()


def _find(network: Network) -> Any:
    def find_metaserver(url: str, *, timeout_s: float = 3.0) -> str:
        """Return the gRPC address of a metaserver, without the HTTP request. A proxy skips stopped metaservers."""
        process = current()
        served = [
            host
            for host in METASERVER_HOSTS
            if network.answers((host, GRPC_PORT))
            and not network.is_cut(process.ip, host)
            and not network.is_cut(host, process.ip)
        ]
        if not served:
            raise OSError(111, "Connection refused")
        return f"{network.loop.rng.choice(served)}:{GRPC_PORT}"

    return find_metaserver


def _no_poll(*_: Any, **__: Any) -> None:
    raise OSError(111, "Connection refused")


@functools.cache
def _scripts(location: str) -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", location)
    return ScriptDirectory.from_config(config)


class Scripts:
    """Stands in for alembic's ScriptDirectory: migrations are read once instead of at each start of a metaserver."""

    @staticmethod
    def from_config(config: Config) -> ScriptDirectory:
        return _scripts(str(config.get_main_option("script_location")))


def _with_virtual_time(prepare: Any) -> Any:
    def prepared(connection: Any, record: Any) -> None:
        prepare(connection, record)
        give_virtual_time(connection)

    return prepared


def give_virtual_time(connection: sqlite3.Connection) -> None:
    """Give SQLite the world's clock: by it, rows become old enough for a watchdog."""

    def now() -> str:
        return datetime.fromtimestamp(_wall_of_all(), UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]

    def real(function: str) -> Any:
        def call(*words: Any) -> Any:
            given = [now() if word == "now" else word for word in words]
            return _CLOCK.execute(f"SELECT {function}({', '.join('?' * len(given))})", given).fetchone()[0]

        return call

    for function in ("strftime", "julianday"):
        connection.create_function(function, -1, real(function))
    connection.create_function("current_timestamp", 0, lambda: now()[:19])


_CLOCK = sqlite3.connect(":memory:")
"""Calculates dates as SQLite does."""


def _wall_of_all() -> float:
    """Return the wall clock of the database's own machine."""
    loop = asyncio.get_event_loop()
    return SINCE_1970_S + loop.now_s


def _watched(loop: VirtualLoop, kind: type) -> Any:
    """Remember the newest objects of a class, for their states."""
    real: Any = kind.__init__

    def init(self: Any, *args: Any, **words: Any) -> None:
        real(self, *args, **words)
        if (process := current()) is not None:
            loop.lives.append((process, self))

    return mock.patch.object(kind, "__init__", init)


def _patches(loop: VirtualLoop, network: Network, make_disk: Any, dice: Random) -> list[Any]:
    return [
        *(mock.patch.object(time, name, lambda: _monotonic(loop)) for name in ("monotonic",)),
        mock.patch.object(time, "monotonic_ns", lambda: int(_monotonic(loop) * 1e9)),
        mock.patch.object(time, "time", lambda: _wall(loop)),
        mock.patch.object(time, "time_ns", lambda: int(_wall(loop) * 1e9)),
        mock.patch.object(time, "perf_counter", lambda: _spent(loop)),
        mock.patch.object(time, "sleep", lambda seconds: None),
        mock.patch.object(os, "urandom", dice.randbytes),
        mock.patch.object(random, "_urandom", dice.randbytes),
        mock.patch.object(os, "_exit", _exit),
        mock.patch.object(grpc.aio, "insecure_channel", lambda address, options=(): Channel(network, address)),
        mock.patch.object(grpc.aio, "server", lambda interceptors=(), options=(): RpcServer(network, interceptors)),
        *(
            mock.patch(f"qmq.{name}.ThreadPoolExecutor", Threads)
            for name in (
                "server.service",
                "metaserver.storage.database",
                "metaserver.cluster.snapshot",
                "metaserver.actions.databases",
                "watchdog.leader",
                "watchdog.watcher",
            )
        ),
        *(
            mock.patch(f"qmq.{name}.find_metaserver", _find(network))
            for name in ("server.meta_link", "server.access", "client.route_watch", "watchdog.meta_link")
        ),
        mock.patch("qmq.client.route_watch.poll", _no_poll),
        mock.patch("qmq.client.route_watch.grpc_begins", lambda: None),
        mock.patch("qmq.client.producer._id_prefix", lambda metaserver: f"{dice.getrandbits(64):016x}"),
        mock.patch("qmq.memory.used_bytes", lambda: 1 << 20),
        mock.patch("qmq.memory.ram_bytes", lambda: 1 << 34),
        mock.patch("qmq.server.running.RealDisk", make_disk),
        mock.patch("qmq.delayserver.main.RealDisk", make_disk),
        mock.patch("qmq.server.running.gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None)),
        mock.patch("qmq.server.running.collect_by_the_clock", _never),
        mock.patch("qmq.broker.main.open_http", Nothing),
        mock.patch("qmq.delayserver.main.open_http", Nothing),
        mock.patch("qmq.watchdog.main.HttpPort", Nothing),
        mock.patch("qmq.watchdog.main.listen", Nothing),
        mock.patch("qmq.watchdog.database.LOCK_S", 0),  # every lock lasts for one call only
        mock.patch("qmq.watchdog.database._prepare_sqlite", _with_virtual_time(database._prepare_sqlite)),
        mock.patch("qmq.metaserver.main.HttpPort", Nothing),
        mock.patch("qmq.metaserver.main.build_app", Nothing),
        mock.patch("qmq.metaserver.main.listen", Nothing),
        mock.patch("qmq.metaserver.storage.engine.ScriptDirectory", Scripts),
        mock.patch("qmq.client.blocked_loop.LoopMonitor._run", lambda monitor: None),  # its thread has another clock
        mock.patch("qmq.client.lifetime._open", set()),  # killed clients stay in it
        _watched(loop, SessionLife),
        _watched(loop, BatchLife),
    ]


@contextlib.contextmanager
def _closed_connections() -> Iterator[None]:
    """Close the databases' connections at the end: killed processes leave theirs open, and descriptors run out."""
    connections: list[sqlite3.Connection] = []

    def keep(connection: sqlite3.Connection, record: object) -> None:
        connections.append(connection)

    event.listen(Engine, "connect", keep)
    try:
        yield
    finally:
        event.remove(Engine, "connect", keep)
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def replaced(loop: VirtualLoop, network: Network, make_disk: Any, seed: int) -> Iterator[None]:
    """Replace them while the context lasts."""
    state = random.getstate()
    random.seed(seed)
    patches = _patches(loop, network, make_disk, Random(seed))
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            for patch in [*patches, _closed_connections()]:
                stack.enter_context(patch)
            yield
    finally:
        random.setstate(state)
        gc.enable()
