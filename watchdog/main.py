"""Shell. Builds a watchdog, runs it until SIGTERM or Ctrl-C, and releases its lease."""

from __future__ import annotations

import asyncio
import logging

from qmq.client.numbered_sender import NumberedSender
from qmq.descriptors import limit, watchdog_ports
from qmq.http_port import HttpPort, bind_address, listen
from qmq.process_main import run_process
from qmq.watchdog.acceptor import Acceptor
from qmq.watchdog.leader import Leader
from qmq.watchdog.meta_link import MetaLink
from qmq.watchdog.metrics import Metrics
from qmq.watchdog.settings import WatchdogSettings
from qmq.watchdog.watcher import Watcher

log = logging.getLogger("qmq.watchdog")

APP = "watchdog"


async def serve(settings: WatchdogSettings, stop: asyncio.Event) -> bool:
    """Run until `stop`; return whether a call to a database still hangs. Raise OSError if the port is taken."""
    listener, ports = listen(await bind_address(settings.host), settings.http_port), watchdog_ports(limit())
    address = settings.advertised(listener.getsockname()[1])
    link = MetaLink(settings)
    async with NumberedSender(metaserver=settings.metaserver, token=settings.token, app=APP) as sender:
        leader = Leader(settings, link, sender, address)
        metrics = Metrics(leader)
        watcher = Watcher(settings, leader, link, metrics)
        http = HttpPort(Acceptor(settings, leader, watcher, metrics, link).app(), listener, connections_max=ports.http)
        tasks = [asyncio.create_task(work) for work in (leader.run(), watcher.run())]
        serving = asyncio.create_task(http.run())
        stopping = asyncio.create_task(stop.wait())
        log.info("watchdog serving address=%s room=%s node=%s", address, settings.room, leader.lease.node)
        try:
            await asyncio.wait({stopping, serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await leader.stop()
            for task in (*tasks, serving, stopping):
                task.cancel()
            results = await asyncio.gather(*tasks, serving, return_exceptions=True)
            await link.close()
    for failed in (result for result in results if isinstance(result, Exception)):
        raise failed
    log.info("watchdog stopped")
    return leader.is_hanging or watcher.is_hanging


def main(arguments: list[str] | None = None) -> int:
    """Run a watchdog; return the exit status of `run_process`."""
    description = "qmq's watchdog: sends the messages of rows that stay in outboxes."
    return run_process("watchdog", description, WatchdogSettings, "QMQ_WATCHDOG", serve, arguments)
