"""Shell. Main of a gateway: serves until SIGTERM or Ctrl-C, then returns undecided messages."""

from __future__ import annotations

import asyncio
import logging
import socket

from qmq.descriptors import limit
from qmq.gateway.app import build_app
from qmq.gateway.clients import Clients
from qmq.gateway.guard import Access, configure_access_log
from qmq.gateway.metrics import Metrics
from qmq.gateway.settings import GatewaySettings
from qmq.http_port import HttpPort, bind_address, listen
from qmq.process_main import run_process
from qmq.types import Endpoint

log = logging.getLogger("qmq.gateway")


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> bool:
    """Run until `stop`; return False, because no thread waits for a database. Raises OSError if the port is taken."""
    listener = listen(await bind_address(settings.host), settings.http_port)
    cut_off_stalled(listener, settings.stall_s)
    configure_access_log(settings.access_log)
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
        await clients.close()  # the port still answers meanwhile: received acks are stored, pulls end
        for task in (serving, ticking, stopping):
            task.cancel()
        results = await asyncio.gather(serving, ticking, return_exceptions=True)
    for failed in (result for result in results if isinstance(result, Exception)):
        raise failed
    log.info("gateway stopped")
    return False


def cut_off_stalled(listener: socket.socket, stall_s: int) -> None:
    """Let the kernel end connections whose client reads nothing for `stall_s` (Linux)."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_s * 1000)


def main(arguments: list[str] | None = None) -> int:
    """Run a gateway; return the exit status of `run_process`."""
    description = "qmq's HTTP gateway: produce and consume without a client library."
    return run_process("gateway", description, GatewaySettings, "QMQ_GATEWAY", serve, arguments)
