"""Shell. Main loop of a broker or delay server: reads its settings, recovers its log, serves until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar, cast

from qmq.access import keep_private
from qmq.descriptors import copy_ports, limit, raise_limit, report, spares
from qmq.errors import QmqError
from qmq.log import MessageLog, RealDisk
from qmq.log.disk import one_process
from qmq.logs import configure
from qmq.memory import collect_by_the_clock
from qmq.replication.identity import IdentityFile
from qmq.replication.settings import CopySettings
from qmq.server.reserve import wait_for_room
from qmq.settings import InvalidSettings, load

log = logging.getLogger(__name__)

S = TypeVar("S", bound=CopySettings)


Tasks = list[Coroutine[None, None, None]]
"""Tasks of a process; none of them ends by itself."""

Build = Callable[[S, MessageLog, RealDisk, IdentityFile], Tasks]
"""Called on the loop, once the log is recovered."""


def run(name: str, settings_type: type[S], prefix: str, description: str, build: Build[S]) -> int:
    """Run until SIGTERM or SIGINT; return the exit status: 0 after a signal, 2 for wrong settings, 1 for a failed
    start.
    """
    parser = argparse.ArgumentParser(prog=f"qmq {name}", description=description)
    parser.add_argument("--config", type=Path, help=f"TOML file; {prefix}_… variables override it")
    arguments = parser.parse_args()
    try:
        settings = load(settings_type, prefix=prefix, path=arguments.config, environ=os.environ)
    except InvalidSettings as error:
        print(error, file=sys.stderr)
        return 2
    configure(settings.log_level, settings.log_format)
    keep_private()
    raise_limit()
    spares.hold()
    report(copy_ports(limit(), settings.connections_max), settings.connections_max)
    try:
        settings.data.mkdir(parents=True, exist_ok=True)
        with (
            one_process(settings.data, name) as instance,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            runner.run(_serve(settings, build, instance))
    except (QmqError, OSError) as error:
        log.critical("%s cannot start: %s", name, error)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return cast(Callable[[], asyncio.AbstractEventLoop], uvloop.new_event_loop)


async def _serve(settings: S, build: Build[S], instance: str) -> None:
    disk = RealDisk(settings.data, cached_bytes=settings.cached_bytes)
    await wait_for_room(disk)
    began = time.monotonic()
    message_log = MessageLog(disk, segment_bytes=settings.segment_bytes, tail_bytes=settings.tail_bytes)
    log.info(
        "log recovered start=%d end=%d segments=%d torn=%d seconds=%.2f",
        message_log.start,
        message_log.end,
        len(message_log.bases),
        message_log.torn_bytes,
        time.monotonic() - began,
    )
    identity = IdentityFile(disk, new_incarnation=secrets.token_hex(8), instance=instance)
    parts = build(settings, message_log, disk, identity)
    gc.collect()
    gc.freeze()  # imports and what they built stay for good; each look at them costs 30 ms
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(task) for task in parts]
    tasks += [asyncio.ensure_future(_wait(stop)), asyncio.ensure_future(collect_by_the_clock())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    identity.points.save()
    log.info("stopped end=%d", message_log.end)


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
