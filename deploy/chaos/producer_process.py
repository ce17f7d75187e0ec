"""Shell. A producer as a process: sends messages at a steady rate, and records each before its call and after the
answer.

Two streams run side by side, one call after the other in each: messages with order keys, and those with tags.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import qmq
from qmq.deploy.chaos.clients import KEYED, PLAIN, TAGS, Journal, content_of, now
from qmq.deploy.chaos.records import Sending, Sent

CALLS_PER_S = 10
LATE_MAX = 1_000
POISONED = 0.002
"""Share of messages that every handler fails."""
POISONED_RETRIES = 3


class Stream:
    """Messages of one subject from one sender."""

    def __init__(self, name: str, subject: str, *, keys: int, rng: random.Random) -> None:
        self._name = name
        self._subject = subject
        self._keys = keys
        self._rng = rng
        self._made = 0

    def message(self) -> qmq.Message:
        self._made += 1
        rng, number = self._rng, self._made
        key = f"{self._name}-{rng.randrange(self._keys)}" if self._keys and rng.random() < 0.9 else None
        tags = rng.sample(TAGS, rng.choice((0, 1, 1, 2)))
        poison = rng.random() < POISONED
        return qmq.Message(
            self._subject,
            {"n": number, "x": "x" * rng.randint(0, 60), "poison": poison},
            tags=tags,
            order_key=key,
            id=f"{self._name}-{number}",
            retries_max=POISONED_RETRIES if poison else None,
        )

    async def run(self, producer: qmq.Producer, journal: Journal, count: int, rate: float, stop: asyncio.Event) -> None:
        """Send `count` messages, or until `stop` if 0; at `rate` per second, and faster after a fault to catch up."""
        began = time.monotonic()
        while not stop.is_set() and (not count or self._made < count):
            due = began + self._made / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late = int((time.monotonic() - due) * rate)
            usual = max(1, int(rate / CALLS_PER_S))
            size = self._rng.randint(1, 2 * usual) + min(late, LATE_MAX)
            messages = [self.message() for _ in range(min(size, count - self._made if count else size))]
            at = now()
            journal.write_all(
                Sending(
                    at,
                    self._name,
                    message.subject,
                    str(message.id),
                    message.order_key or "",
                    list(message.tags),
                    content_of(message),
                )
                for message in messages
            )
            receipts = await producer.send_many(messages)
            at = now()
            journal.write_all(
                Sent(at, receipt.message_id, receipt.outcome.value, receipt.broker_group, receipt.sequence)
                for receipt in receipts
            )


async def main(options: dict[str, Any]) -> None:
    name, count = options["name"], options["count"]
    rng = random.Random(options["seed"])
    plain = Stream(f"{name}p", PLAIN, keys=0, rng=random.Random(rng.random()))
    keyed = Stream(f"{name}k", KEYED, keys=options["keys"], rng=random.Random(rng.random()))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with Journal(Path(options["journal"])) as journal:
        async with (
            qmq.Producer(
                metaserver=options["metaserver"], app="history", timeout_s=options["send_s"], answer_timeout_s=2.0
            ) as producer,
            asyncio.TaskGroup() as tasks,
        ):
            for stream, share in ((plain, count - count // 2), (keyed, count // 2)):
                tasks.create_task(stream.run(producer, journal, share, options["rate"] / 2, stop))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(main(json.loads(sys.argv[1])))
