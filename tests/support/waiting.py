"""Shell. Waiting for an event, within a bound that only a hang reaches, also while a consumer runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import qmq

WAIT_S = 60.0
"""A busy machine pauses for seconds; after a minute, an event will not come."""
POLL_S = 0.01

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "it happens", timeout_s: float = WAIT_S) -> T:
    """Poll until `condition()` is true; return its value."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)
    return found


async def until_async(condition: Callable[[], T], what: str = "it happens", timeout_s: float = WAIT_S) -> T:
    """Poll on a running event loop until `condition()` is true; return its value."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)
    return found


@asynccontextmanager
async def consuming(consumer: qmq.Consumer) -> AsyncIterator[asyncio.Task[None]]:
    """Run a consumer; stop it at the end, and raise its errors."""
    task = asyncio.create_task(consumer.run())
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        consumer.stop()
        await task


async def settle(turns: int = 100) -> None:
    """Turn the event loop, so that everything in flight between sockets of this process arrives."""
    for _ in range(turns):
        await asyncio.sleep(0)
