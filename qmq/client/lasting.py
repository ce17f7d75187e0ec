"""Shell. Tasks of a client that run until it is closed.

One that ends before, by a defect, says so at once: nothing would be sent or received any more, and nobody would hear
why before the client is closed.
"""

from __future__ import annotations

import asyncio

from qmq.logs import bounded

log = bounded(__name__)


def lasting(task: asyncio.Task[None]) -> asyncio.Task[None]:
    """Let it be logged why the task ends, unless it is cancelled; return it."""
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("client broken: a part of it ended by a defect; close it and make another one", exc_info=error)
