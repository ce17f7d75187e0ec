"""Shell. Runs an operator's action within its time: a caller is answered then, and a change goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from qmq.metaserver.actions import Action, Answer, Status
from qmq.rights import Caller

log = logging.getLogger("qmq.metaserver")

GRACE_MS = 1000
"""Added to what an action may take, so that its own answer comes first."""

_going_on: set[asyncio.Task[Answer]] = set()
"""Changes whose caller does not wait any more: a task that nobody holds would be thrown away."""


class ActionsPort(Protocol):
    """`metaserver.actions.Actions`."""

    async def run(self, name: str, words: Mapping[str, str], caller: Caller) -> Answer: ...


async def run_within(actions: ActionsPort, action: Action, words: Mapping[str, str], caller: Caller) -> Answer:
    """Run an action. Exceptions of it that are bugs pass."""
    task = asyncio.create_task(actions.run(action.name, words, caller))
    limit_ms = action.wait_ms + _asked_wait_ms(words) + GRACE_MS
    try:
        async with asyncio.timeout(limit_ms / 1000):
            return await asyncio.shield(task)
    except TimeoutError:
        pass
    if not action.changes:
        task.cancel()
        return Answer(Status.WAIT, f"{action.name} was not done within {limit_ms} ms")
    _going_on.add(task)
    task.add_done_callback(_finished)
    return Answer(
        Status.UNKNOWN, f"{action.name} was not done within {limit_ms} ms and goes on; look what became of it"
    )


def _finished(task: asyncio.Task[Answer]) -> None:
    _going_on.discard(task)
    if not task.cancelled() and (error := task.exception()):
        log.error("an action that nobody waited for failed: %r", error)


def _asked_wait_ms(words: Mapping[str, str]) -> int:
    text = str(words.get("waitMs", ""))
    return min(int(text), 600_000) if text.isascii() and text.isdigit() and len(text) < 10 else 0
