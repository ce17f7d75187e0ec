"""Shell. The application of the outbox's benchmark, in a process of its own: transactions at fixed times.

Each transaction writes an order and a message's row, and deletes the row a little later, as a producer does after the
receipt. Latency counts from the planned time. In the measuring process it would wait for that process' threads.

The same module has the process to compare with, which only computes, for a share of a core.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from sqlalchemy import Connection, create_engine

from benchmarks.worker import answer
from qmq.message import Message, Value
from qmq.outbox.row import encode_row

SUBJECT = "order.paid"
TABLE = "qmq_msg_queue"


def content(name: str) -> str:
    """A message as in a row."""
    properties: dict[str, Value] = {"orderNo": 4_711, "state": "paid", "text": "x" * 100}
    return encode_row(Message(SUBJECT, properties, id=name), 1_700_000_000_000)


COMPUTE_S = 0.02
"""Length of one computation, about that of a drain's step."""


async def compute(share: float, seconds: float) -> dict[str, Any]:
    """Use this share of a core."""
    ends = time.monotonic() + seconds
    while (now := time.monotonic()) < ends:
        while time.monotonic() < now + COMPUTE_S:
            pass
        time.sleep(COMPUTE_S * (1 - share) / share)
    return {}


class Application:
    """One connection to the application's database, opened by the first transaction."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        self._connection: Connection | None = None
        self._written = 0

    async def transact(self, per_s: int, seconds: float) -> dict[str, Any]:
        """Return the milliseconds of each transaction."""
        due, took_ms = time.monotonic(), []
        ends = due + seconds
        while (due := due + 1 / per_s) < ends:
            time.sleep(max(0.0, due - time.monotonic()))
            self._transaction()
            took_ms.append((time.monotonic() - due) * 1000)
        return {"took_ms": took_ms}

    def _transaction(self) -> None:
        connection = self._connection = self._connection or self._engine.connect()
        with connection.begin():
            connection.exec_driver_sql("INSERT INTO orders (state) VALUES ('paid')")
            row = connection.exec_driver_sql(
                f"INSERT INTO {TABLE} (content, create_time) VALUES (%s, NOW()) RETURNING id",
                (content(f"sent-{self._written}"),),
            )
            id = row.scalar_one()
        with connection.begin():
            connection.exec_driver_sql(f"DELETE FROM {TABLE} WHERE id = {id}")
        self._written += 1


if __name__ == "__main__":
    asyncio.run(answer({"transact": Application(sys.argv[1]).transact, "compute": compute}))
