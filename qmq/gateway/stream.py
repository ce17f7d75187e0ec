"""Shell. Messages as server-sent events, and requests that wait while their client may leave.

: keep-alive          a comment, while there is no message
id: HANDLE            a message; its handle is also in the data
event: message
data: {JSON}
event: error          the stream ends
data: {"error": {…}}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request

from qmq.errors import QmqError
from qmq.gateway.outcomes import HttpError, Refused, error_of
from qmq.gateway.session import Session
from qmq.logs import retrieve_error

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
_KEEP_ALIVE = ": keep-alive\n\n"


class ClientLeft(Exception):
    """The client closed its connection; nothing can be sent."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientLeft: the client left first.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.add_done_callback(retrieve_error)  # its client left
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise ClientLeft
    return task.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(session: Session, *, unacked_max: int, lease_s: float, keep_alive_s: float) -> AsyncIterator[str]:
    """Yield events; pause at `unacked_max` undecided messages of the session, and while the client reads nothing."""
    yield _KEEP_ALIVE
    try:
        with session:
            while True:
                if session.room(unacked_max):
                    # One at a time: of a stream that breaks, one message at most waits for its lease.
                    messages = await session.pull(1, wait_s=keep_alive_s, lease_s=lease_s)
                    for message in messages:
                        yield f"id: {message.handle}\nevent: message\ndata: {message.model_dump_json()}\n\n"
                    if messages:
                        continue
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(keep_alive_s):
                            await session.wait_for_room()
                            continue
                yield _KEEP_ALIVE
    except Refused as refused:
        yield _failed(refused.error)
    except QmqError as error:
        yield _failed(error_of(error))


def _failed(error: HttpError) -> str:
    return f"event: error\ndata: {json.dumps({'error': error.as_json()})}\n\n"
