"""Shell. Builds the metaserver, serves until SIGTERM or Ctrl-C, stops in order."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from metaserver.access import Access
from metaserver.db.engine import open_database
from metaserver.db.repository import Repository
from metaserver.http.app import build_app
from metaserver.liveness import Liveness
from metaserver.management import Management
from metaserver.metrics import Metrics
from metaserver.registry import Registry, now_ms
from metaserver.rpc.broker_client import Brokers
from metaserver.rpc.servicer import MetaserverRpc
from metaserver.rpc.tokens import make_door
from metaserver.settings import MetaserverSettings
from metaserver.swap import Swaps
from qmq.proto.qmq_pb2_grpc import add_MetaserverServicer_to_server
from qmq.settings import InvalidSettings, load

log = logging.getLogger("qmq.metaserver")

STOP_S = 0.2
"""How long calls get to end when the process stops. Streams do not end: brokers and clients come back by themselves."""

GRPC_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else a second metaserver on the same port would start and get half of the calls
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 10_000),  # a client whose machine is gone is noticed within 20 s
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Metaserver:
    """One metaserver process: joins the parts, opens the ports, closes them again."""

    def __init__(self, settings: MetaserverSettings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._access = Access((settings.cluster_token, settings.cluster_token_before))
        self._metrics = Metrics()
        liveness = Liveness(timeout_ms=settings.heartbeat_timeout_ms, started_ms=now_ms())
        self._registry = Registry(
            Repository(engine), liveness, self._metrics, groups_min=settings.groups_per_subject_min,
            groups_new=settings.groups_per_subject_new,
        )
        brokers = Brokers(settings.cluster_token, timeout_ms=settings.broker_timeout_ms)
        swaps = Swaps(self._registry, brokers, settings)
        self._management = Management(self._registry, swaps, brokers, self._metrics)
        self._rpc = MetaserverRpc(
            self._registry, self._access, self._metrics, watch_subjects_max=settings.watch_subjects_max
        )
        self.grpc_port = 0
        self.http_port = 0

    async def serve(self, stop: asyncio.Event, started: asyncio.Event | None = None) -> None:
        """Open both ports, serve until `stop`, close them.

        Raises:
            OSError, RuntimeError: a port is taken. SQLAlchemyError: the database failed.
        """
        await self._registry.load()
        rpc_server = grpc.aio.server(interceptors=[make_door(self._access, self._metrics)], options=GRPC_OPTIONS)
        add_MetaserverServicer_to_server(self._rpc, rpc_server)
        self.grpc_port = rpc_server.add_insecure_port(f"{self._settings.host}:{self._settings.grpc_port}")
        listener = socket.create_server((self._settings.host, self._settings.http_port), backlog=128)
        self.http_port = listener.getsockname()[1]
        await rpc_server.start()
        http_server = _HttpServer(self._app())
        silence = asyncio.create_task(self._registry.watch_silence())
        serving = asyncio.create_task(http_server.serve(sockets=[listener]))
        log.info("metaserver serving http=%s:%d grpc_port=%d", self._settings.host, self.http_port, self.grpc_port)
        if started:
            started.set()
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopping, serving, silence}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            silence.cancel()
            stopping.cancel()
            http_server.should_exit = True
            await rpc_server.stop(STOP_S)
            results = await asyncio.gather(silence, serving, return_exceptions=True)
            listener.close()
            self._engine.dispose()
        for failed in (r for r in results if isinstance(r, Exception)):
            raise failed
        log.info("metaserver stopped")

    def _app(self) -> FastAPI:
        address = f"{self._settings.advertised}:{self.grpc_port}"
        limit = self._settings.request_bytes_max
        return build_app(
            self._registry, self._management, self._access, self._metrics, address=address, request_bytes_max=limit
        )


class _HttpServer(uvicorn.Server):
    """uvicorn without its own handling of signals: this process has two servers to stop."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                limit_concurrency=1000,
                timeout_graceful_shutdown=2,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every system; slower, else the same
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]


async def run(settings: MetaserverSettings, engine: Engine) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Metaserver(settings, engine).serve(stop)


def main(arguments: list[str] | None = None) -> int:
    """Run a metaserver; return its exit status: 0 stopped in order, 1 cannot serve, 2 wrong settings."""
    parser = argparse.ArgumentParser(prog="metaserver", description="qmq's metaserver: groups, routes, roles.")
    parser.add_argument("--config", type=Path, help="TOML file; QMQ_METASERVER_<NAME> in the environment overrides it")
    options = parser.parse_args(arguments)
    try:
        settings = load(MetaserverSettings, prefix="QMQ_METASERVER", path=options.config, environ=os.environ)
    except InvalidSettings as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for chatty in ("alembic", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(run(settings, open_database(settings.database)))
    except (OSError, RuntimeError, SQLAlchemyError) as error:
        print(f"metaserver: cannot serve: {error}", file=sys.stderr)
        return 1
    return 0
