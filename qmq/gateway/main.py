"""Shell. Builds a gateway, serves until SIGTERM or Ctrl-C, returns undecided messages."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from qmq.descriptors import limit, raise_limit
from qmq.errors import QmqError
from qmq.gateway.access import Access
from qmq.gateway.app import build_app
from qmq.gateway.clients import Clients
from qmq.gateway.guard import configure_access_log
from qmq.gateway.metrics import Metrics
from qmq.gateway.settings import GatewaySettings
from qmq.http_port import HttpPort, bind_address, listen
from qmq.logs import configure
from qmq.settings import InvalidSettings, load
from qmq.types import Endpoint

log = logging.getLogger("qmq.gateway")


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Run until `stop`. Raise OSError if the port is taken."""
    listener = listen(await bind_address(settings.host), settings.http_port)
    cut_off_stalled(listener, settings.stall_s)
    metrics = Metrics()
    clients = Clients(settings, metrics)
    app = build_app(settings, clients, Access(settings.metaserver, settings.app), metrics)
    http = HttpPort(
        app,
        listener,
        connections_max=min(settings.connections_max, limit() // 2),
        trusted_proxies=settings.trusted_proxies,
    )
    log.info("gateway serving address=%s", Endpoint(settings.host, listener.getsockname()[1]))
    serving, ticking = asyncio.create_task(http.run()), asyncio.create_task(clients.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping, serving, ticking}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await clients.close()  # the port still answers: acks that came are stored, pulls end
        for task in (serving, ticking, stopping):
            task.cancel()
        results = await asyncio.gather(serving, ticking, return_exceptions=True)
    for failed in (result for result in results if isinstance(result, Exception)):
        raise failed
    log.info("gateway stopped")


def cut_off_stalled(listener: socket.socket, stall_s: int) -> None:
    """Let the kernel end connections whose client reads nothing for so long (Linux)."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_s * 1000)


async def _run(settings: GatewaySettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


def main(arguments: list[str] | None = None) -> int:
    """Run a gateway; return its exit status: 0 stopped in order, 1 cannot serve, 2 invalid settings."""
    parser = argparse.ArgumentParser(
        prog="qmq gateway", description="qmq's HTTP gateway: produce and consume without a client library."
    )
    parser.add_argument("--config", type=Path, help="TOML file; QMQ_GATEWAY_<NAME> in the environment overrides it")
    options = parser.parse_args(arguments)
    try:
        settings = load(GatewaySettings, prefix="QMQ_GATEWAY", path=options.config, environ=os.environ)
    except InvalidSettings as error:
        print(error, file=sys.stderr)
        return 2
    configure(settings.log_level, settings.log_format)
    configure_access_log(settings.access_log)
    raise_limit()
    try:
        asyncio.run(_run(settings))
    except (OSError, QmqError) as error:
        print(f"gateway: cannot serve: {error}", file=sys.stderr)
        return 1
    return 0
