"""Shell. Main function of a server process: settings, log, signals, exit status."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from qmq.access import keep_private
from qmq.descriptors import raise_limit
from qmq.errors import QmqError
from qmq.logs import configure
from qmq.settings import InvalidSettings, load

log = logging.getLogger(__name__)


class ProcessSettings(Protocol):
    """Settings of every server process."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_format(self) -> str: ...


S = TypeVar("S", bound=ProcessSettings)

Serve = Callable[[S, asyncio.Event], Coroutine[Any, Any, bool]]
"""Function that serves until the event is set, and returns whether a thread still waits for its database."""


def run_process(
    name: str,
    description: str,
    settings_type: type[S],
    prefix: str,
    serve: Serve[S],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run `serve` until SIGTERM or SIGINT.

    Returns:
        Exit status: 0 after a signal, 1 for a process that cannot serve, 2 for invalid settings.
    """
    parser = argparse.ArgumentParser(prog=f"qmq {name}", description=description)
    parser.add_argument("--config", type=Path, help=f"TOML file; {prefix}_<NAME> in the environment overrides it")
    options = parser.parse_args(arguments)
    try:
        settings = load(settings_type, prefix=prefix, path=options.config, environ=os.environ)
    except InvalidSettings as error:
        print(error, file=sys.stderr)
        return 2
    configure(settings.log_level, settings.log_format)
    keep_private()
    raise_limit()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            is_hanging = runner.run(_until_signal(serve, settings))
    except (OSError, QmqError) as error:
        log.critical("%s cannot serve: %s", name, error)
        return 1
    if is_hanging:  # everything is closed, but Python would wait for the thread
        logging.shutdown()
        os._exit(0)
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # missing on some systems; without it, only slower
        return None
    return cast(Callable[[], asyncio.AbstractEventLoop], uvloop.new_event_loop)


async def _until_signal(serve: Serve[S], settings: S) -> bool:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await serve(settings, stop)
