"""Shell. Producers that send without end, in batches and one by one, and write down what they were told."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Any

import qmq
from qmq.deploy.chaos.history import History, Sent
from qmq.message import Value

SINGLE_SENDERS = 6
PAUSE_S = 0.02
"""Faults are the point here, not load: what is sent must be read and compared afterwards."""


class Senders:
    """Two producers on one loop; `run` ends when `stop` is set and every outcome is known."""

    def __init__(self, history: History, *, metaserver: str, token: str, subjects: list[str], seed: int) -> None:
        self._history, self._subjects, self._seed = history, subjects, seed
        self._options: dict[str, Any] = {"metaserver": metaserver, "token": token, "app": "chaos"}
        self.stop = asyncio.Event()

    async def run(self) -> None:
        options = self._options
        async with (
            qmq.Producer(**options, timeout_s=15.0, answer_timeout_s=2.0) as many,
            qmq.Producer(**options, timeout_s=6.0, answer_timeout_s=1.0) as single,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._send_many(many))
            for number in range(SINGLE_SENDERS):
                tasks.create_task(self._send_single(single, number))

    async def _send_many(self, producer: qmq.Producer) -> None:
        rng, made = random.Random(f"{self._seed} many"), 0
        while not self.stop.is_set():
            messages = []
            for _ in range(rng.randint(1, 60)):
                made += 1
                body: dict[str, Value] = {"n": made, "x": "x" * rng.randint(0, 400)}
                messages.append(qmq.Message(rng.choice(self._subjects), body, id=f"many-{made}"))
            begun = time.monotonic()
            receipts = await producer.send_many(messages)
            self._note("many", begun, receipts)
            await asyncio.sleep(PAUSE_S)

    async def _send_single(self, producer: qmq.Producer, number: int) -> None:
        rng, made = random.Random(f"{self._seed} {number}"), 0
        while not self.stop.is_set():
            made += 1
            message = qmq.Message(rng.choice(self._subjects), {"x": "x" * rng.randint(0, 100)}, id=f"{number}-{made}")
            begun = time.monotonic()
            self._note(f"single {number}", begun, [await producer.send(message)])
            await asyncio.sleep(PAUSE_S)

    def _note(self, sender: str, begun: float, receipts: Iterable[qmq.Receipt]) -> None:
        done = time.monotonic()
        for receipt in receipts:
            self._history.sent.append(
                Sent(
                    receipt.message_id,
                    receipt.subject,
                    sender,
                    begun,
                    done,
                    receipt.outcome.value,
                    receipt.broker_group,
                    receipt.sequence,
                )
            )
