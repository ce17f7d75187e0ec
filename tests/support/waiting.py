"""Shell. Waiting for an event, within a bound that only a hang reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 60.0
"""A busy machine pauses for seconds; an event later than a minute does not come."""
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
    """The same on an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)
    return found


async def settle(turns: int = 100) -> None:
    """Let the event loop turn: all that is under way between sockets of this process, and waits for no time, comes."""
    for _ in range(turns):
        await asyncio.sleep(0)
