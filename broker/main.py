"""Shell. Starts one broker: reads its settings, recovers its log, joins the parts, serves until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from broker.control import Control
from broker.meta_link import MetaLink
from broker.metrics import serve_metrics
from broker.repair import keep_whole
from broker.service import Service
from broker.settings import BrokerSettings
from qmq.errors import QmqError
from qmq.log import MessageLog, RealDisk
from qmq.logs import configure
from qmq.replication.identity import IdentityFile
from qmq.settings import InvalidSettings, load

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM or SIGINT; returns the exit status: 0 told to stop, 2 wrong settings, 1 could not start."""
    parser = argparse.ArgumentParser(prog="python -m broker", description="One broker: master or slave of its group.")
    parser.add_argument("--config", type=Path, help="TOML file; QMQ_BROKER_… variables override it")
    arguments = parser.parse_args()
    configure()
    try:
        settings = load(BrokerSettings, prefix="QMQ_BROKER", path=arguments.config, environ=os.environ)
    except InvalidSettings as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with _one_process(settings.data), asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings))
    except (QmqError, OSError) as error:
        log.critical("broker cannot start: %s", error)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return cast(Callable[[], asyncio.AbstractEventLoop], uvloop.new_event_loop)


@contextlib.contextmanager
def _one_process(data: Path) -> Iterator[None]:
    """Two processes on one data directory would destroy it."""
    data.mkdir(parents=True, exist_ok=True)
    with open(data / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QmqError(f"another broker runs on {data}; stop it first") from None
        yield


async def _serve(settings: BrokerSettings) -> None:
    disk = RealDisk(settings.data, cached_bytes=settings.cached_bytes)
    began = time.monotonic()
    message_log = MessageLog(disk, segment_bytes=settings.segment_bytes, tail_bytes=settings.tail_bytes)
    log.info(
        "log recovered start=%d end=%d segments=%d torn=%d seconds=%.2f",
        message_log.start, message_log.end, len(message_log.bases), message_log.torn_bytes, time.monotonic() - began,
    )  # fmt: skip
    identity = IdentityFile(disk, new_incarnation=secrets.token_hex(8))
    service = Service(message_log=message_log, disk=disk, identity=identity, settings=settings)
    server, thread = serve_metrics(service, settings)
    gc.collect()
    gc.freeze()  # what was imported and built stays for good; looking at it again and again costs 30 ms a time
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    tasks: list[asyncio.Future[None]] = [
        asyncio.ensure_future(coroutine)
        for coroutine in (
            service.run(), MetaLink(service, settings).run(), Control(service, settings).serve(),
            keep_whole(service, settings),
        )
    ]  # fmt: skip
    tasks.append(asyncio.ensure_future(_wait(stop)))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.shutdown()
    thread.join()
    for task in done:
        task.result()
    log.info("broker stopped group=%s end=%d", service.node.group, message_log.end)


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
