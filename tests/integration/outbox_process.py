"""Shell. A shop that pays orders and sends a message for each, as a process of its own. It kills itself at a step.

Each order that is not paid yet is paid in a transaction of its own. `crashes` names the step and the order. Each
line of the input is one life, with its options as JSON, each of the output its end. Lives are forked from a
process that has loaded everything, as loading takes the time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import qmq
import qmq.blocking

STEPS = ["before the commit", "after the commit", "before the delete"]
"""Between insert and commit, between commit and send, between send and delete."""
PAID = text("SELECT count(*) FROM orders WHERE number = :number")
PAY = text("INSERT INTO orders (number) VALUES (:number)")


class Crashes:
    """Kills the process at the step that is due."""

    def __init__(self, crashes: dict[str, int]) -> None:
        self._crashes, self.order = crashes, -1

    def at(self, step: str) -> None:
        if self._crashes.get(step) == self.order:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, engine: Engine) -> None:
        """Follow each step of the engine."""
        commit: Callable[[object], None] = engine.dialect.do_commit

        def do_commit(connection: object) -> None:
            self.at("before the commit")  # behind the insert, which is an event of the commit
            commit(connection)
            self.at("after the commit")

        engine.dialect.do_commit = do_commit
        event.listen(engine, "before_cursor_execute", self._execute)

    def _execute(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM qmq_msg_queue"):
            self.at("before the delete")


def message(subject: str, number: int) -> qmq.Message:
    return qmq.Message(subject, {"number": number, "price": 2.5, "isVip": True}, id=f"{subject}-{number}")


async def pay_all(options: dict[str, Any], crashes: Crashes, orders: int) -> None:
    engine = create_async_engine(options["url"])
    crashes.watch(engine.sync_engine)
    async with qmq.Producer(metaserver=options["metaserver"], app="shop") as producer:
        for number in range(orders):
            async with AsyncSession(engine) as session, session.begin():
                if (await session.execute(PAID, {"number": number})).scalar():
                    continue
                crashes.order = number
                await session.execute(PAY, {"number": number})
                await producer.send(message(options["subject"], number), session=session)
            await producer.flush()
    await engine.dispose()


def pay_all_blocking(options: dict[str, Any], crashes: Crashes, orders: int) -> None:
    engine = create_engine(options["url"])
    crashes.watch(engine)
    with qmq.blocking.Producer(metaserver=options["metaserver"], app="shop") as producer:
        for number in range(orders):
            with Session(engine) as session, session.begin():
                if session.execute(PAID, {"number": number}).scalar():
                    continue
                crashes.order = number
                session.execute(PAY, {"number": number})
                producer.send(message(options["subject"], number), session=session)
            producer.flush()
    engine.dispose()


def live(options: dict[str, Any]) -> None:
    crashes, orders = Crashes(options["crashes"]), options["orders"]
    if options["blocking"]:
        pay_all_blocking(options, crashes, orders)
    else:
        asyncio.run(pay_all(options, crashes, orders))


if __name__ == "__main__":
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            live(json.loads(line))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
