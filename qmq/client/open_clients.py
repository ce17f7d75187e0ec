"""Shell. The open clients of a process: what a fork does to them, and the end of a process that did not close them."""

from __future__ import annotations

import atexit
import os
from typing import Protocol

from qmq.logs import bounded

log = bounded(__name__)


class OpenClient(Protocol):
    """A client of an event loop, from when it is opened until it is closed."""

    def inherited(self) -> None:
        """This is a copy in a forked process: refuse every call, and leave the parent's connections alone."""

    @property
    def open_messages(self) -> int:
        """How many messages have no outcome yet."""


_open: set[OpenClient] = set()
_of_parents: list[object] = []
"""Parents' clients. Kept, so that nothing of them is taken apart here: their sockets are the parent's."""


def opened(client: OpenClient) -> None:
    _open.add(client)


def closed(client: OpenClient) -> None:
    _open.discard(client)


def report_lost(messages: int, event: str) -> None:
    """Log messages whose outcome nobody waits for any more."""
    if messages:
        text = "messages are not known to be stored messages=%d: %s before the producer was closed. Use `async with`"
        log.error(text, messages, event)


def _after_fork() -> None:
    _of_parents.extend(_open)
    for client in _open:
        client.inherited()
    _open.clear()


def _at_exit() -> None:
    for client in _open:
        report_lost(client.open_messages, "the process ended")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
