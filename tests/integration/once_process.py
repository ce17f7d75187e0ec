"""Shell. A consumer that handles each message once, as a process of its own. It kills itself at a step.

A property "crash" names a step; each message crashes once. Handling a message is a line in a journal, or a row in the
ledger of the database that its key is kept in.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

import redis.asyncio
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

import qmq
from qmq.idempotence import Idempotence
from qmq.idempotence.redis import RedisKeys
from qmq.idempotence.sqlalchemy import SqlKeys
from qmq.idempotence.transaction import BlockingSqlTransaction, SqlTransaction

LEASE_S = 4.0
"""Longer than a process stands still: a process that holds a key for longer is dead."""
WRITE = text("INSERT INTO ledger (number) VALUES (:number)")


class Crashes:
    """Notes each crash in a directory before it happens, so that it happens once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.current: ContextVar[qmq.ReceivedMessage] = ContextVar("message")

    def at(self, step: str, message: qmq.ReceivedMessage | None = None) -> None:
        message = message or self.current.get(None)
        if message is None or message.get("crash") != step:
            return
        note = self._directory / str(message.id)
        if not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def around(self, message, handle):
        """The outermost filter."""
        self.current.set(message)
        self.at("before the key", message)
        await handle(message)
        self.at("before the ack", message)

    async def before_handler(self, message, handle):
        """The innermost filter."""
        self.at("before the handler", message)
        await handle(message)


@asynccontextmanager
async def keys(options: dict[str, str]) -> AsyncIterator[SqlKeys | RedisKeys]:
    if options["url"].startswith("redis"):
        async with redis.asyncio.Redis.from_url(options["url"]) as client:
            yield RedisKeys(client)
        return
    engine = create_async_engine(options["url"])
    try:
        yield SqlKeys(engine)
    finally:
        await engine.dispose()


async def main(options: dict[str, str]) -> None:
    crashes = Crashes(Path(options["crashes"]))
    consumer = qmq.Consumer(metaserver=options["metaserver"], app="once", consumer_id="c1")
    listen = {"group": "g", "start": "earliest", "concurrency": int(options["concurrency"]), "retry_delay": 0.1}

    if options["kind"] == "keys":
        journal = os.open(options["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        async with keys(options) as store:
            check = Idempotence(store, lease_s=LEASE_S)
            filters = [crashes.around, check, crashes.before_handler]

            @consumer.listen(options["subject"], filters=filters, **listen)
            async def write_line(message):
                os.write(journal, f"{message['number']}\n".encode())  # no buffer: a handled message stays handled
                crashes.at("after the work")

            await consumer.run()
    elif options["kind"] == "transaction":
        engine = create_async_engine(options["url"])
        event.listen(engine.sync_engine, "commit", lambda _: crashes.at("before the commit"))
        once = SqlTransaction(engine)

        @consumer.listen(options["subject"], filters=[crashes.around, once, crashes.before_handler], **listen)
        async def write_row(message):
            await once.session.execute(WRITE, {"number": message.get_int("number")})
            crashes.at("after the work")

        await consumer.run()
    else:
        blocking_engine = create_engine(options["url"])
        event.listen(blocking_engine, "commit", lambda _: crashes.at("before the commit"))
        blocking = BlockingSqlTransaction(blocking_engine)

        @consumer.listen(options["subject"], filters=[crashes.around, blocking], **listen)
        def write_row_in_thread(message):
            crashes.at("before the handler", message)
            blocking.session.execute(WRITE, {"number": message.get_int("number")})
            crashes.at("after the work", message)

        await consumer.run()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
