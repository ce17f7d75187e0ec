"""Shell. Blocking calls from coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread. Who is cancelled meanwhile goes on when it has ended, as nothing can stop it:
    what is done next, for instance to undo it, then finds it done."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # nobody waits for it any more
        raise
