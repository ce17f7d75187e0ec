"""Shell. Connections of Django's ORM in handlers: a broken or aged one is closed before and after each call.

Django does this around each web request. Without it, a thread of a worker would keep a connection that a restart of the
database ended, and all its messages would fail. Active by itself in processes with a configured Django; no call imports
Django.

A plain handler has a thread, and so connections, of its own. Coroutine handlers share the thread of `sync_to_async`:
while others run, only unusable connections are closed, because another handler may read from an aged one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from qmq.logs import bounded

log = bounded(__name__)

_running: set[object] = set()
"""Running calls of coroutine handlers; a set, because event loops of several threads change it."""
_closing: set[asyncio.Task[None]] = set()
"""Tasks that close connections after calls; nothing else refers to them."""


def is_configured() -> bool:
    """Return whether this process has imported Django's ORM and configured its settings."""
    conf = sys.modules.get("django.conf")
    return conf is not None and "django.db" in sys.modules and bool(conf.settings.configured)


def close_old(*, is_alone: bool = True) -> None:
    """Close this thread's connections that are unusable or, if `is_alone`, older than CONN_MAX_AGE; never raises."""
    if not is_configured():
        return
    try:
        for connection in sys.modules["django.db"].connections.all(initialized_only=True):
            if is_alone or _is_broken(connection):
                connection.close_if_unusable_or_obsolete()
    except Exception as error:  # of any driver; the outcome of a message does not depend on it
        log.warning("database connection is not closed error=%r", error)


def close_all() -> None:
    """Close the connections of a thread that ends."""
    if is_configured():
        sys.modules["django.db"].connections.close_all()


def _is_broken(connection: Any) -> bool:
    return connection.errors_occurred and not connection.in_atomic_block and not connection.is_usable()


async def closing_old(call: Callable[[Any], Awaitable[object]], given: object) -> object:
    """Await a coroutine handler, with `close_old` before and after it in the thread of Django's ORM.

    The second `close_old` is not awaited: a cancellation during it would count as the outcome of a handled message.
    """
    from asgiref.sync import sync_to_async  # a dependency of Django

    close, own = sync_to_async(close_old), object()
    _running.add(own)
    try:
        await close(is_alone=len(_running) == 1)
        return await call(given)
    finally:
        _running.discard(own)
        task = asyncio.ensure_future(close(is_alone=not _running))
        _closing.add(task)
        task.add_done_callback(_closing.discard)
