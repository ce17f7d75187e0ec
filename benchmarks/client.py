"""Shell. A qmq client as a worker: sends, pulls and listens with the public classes, as applications do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

import qmq
from benchmarks.figures import percentile
from benchmarks.worker import answer, texts
from qmq.errors import QmqError

PROPERTY = "content"


class Client:
    """The worker's actions. One producer serves all and stays connected between repetitions."""

    def __init__(self, metaserver: str) -> None:
        self._metaserver = metaserver
        self._open = contextlib.AsyncExitStack()
        self._producer: qmq.Producer | None = None

    async def serve(self) -> None:
        async with self._open:
            await answer(
                {
                    "produce": self.produce,
                    "send_each": self.send_each,
                    "send_one": self.send_one,
                    "pace": self.pace,
                    "drain": self.drain,
                    "listen": self.listen,
                    "produce_typed": self.produce_typed,
                    "listen_typed": self.listen_typed,
                    "latency": self.latency,
                    "pace_subjects": self.pace_subjects,
                    "latency_subjects": self.latency_subjects,
                    "produce_tagged": self.produce_tagged,
                }
            )

    async def _opened(self) -> qmq.Producer:
        if self._producer is None:
            producer = qmq.Producer(metaserver=self._metaserver, app="benchmark")
            self._producer = await self._open.enter_async_context(producer)
        return self._producer

    def _consumer(self) -> qmq.Consumer:
        return qmq.Consumer(metaserver=self._metaserver, app="benchmark")

    async def produce(self, subject: str, messages: int, size: int, is_body: bool = False) -> dict[str, Any]:
        """Call `send_many` once; the messages are distinct objects made before, like the peer's frames."""
        producer = await self._opened()
        contents = texts(size)
        bodies = [content.encode() for content in contents]
        if is_body:
            ready = [qmq.Message(subject, body=bodies[number & 63]) for number in range(messages)]
        else:
            ready = [qmq.Message(subject, {PROPERTY: contents[number & 63]}) for number in range(messages)]
        gc.collect()
        began = time.perf_counter()
        receipts = await producer.send_many(ready)
        seconds = time.perf_counter() - began
        _require(receipts.all_stored, "a message of send_many was not stored")
        return {"seconds": seconds, "messages": messages}

    async def produce_tagged(self, subject: str, messages: int, size: int, one_in: int) -> dict[str, Any]:
        """Send messages; one in `one_in` is tagged `rare`, the others `common`."""
        producer = await self._opened()
        contents = texts(size)
        receipts = await producer.send_many(
            qmq.Message(subject, {PROPERTY: contents[number & 63]}, tags=("common",) if number % one_in else ("rare",))
            for number in range(messages)
        )
        _require(receipts.all_stored, "a message of send_many was not stored")
        return {"messages": messages}

    async def send_each(self, subject: str, messages: int, size: int, in_flight: int) -> dict[str, Any]:
        """Call `send` per message, from as many tasks as messages may be in flight."""
        producer = await self._opened()
        contents = texts(size)
        numbers = iter(range(messages))

        async def work() -> None:
            for number in numbers:
                receipt = await producer.send(qmq.Message(subject, {PROPERTY: contents[number & 63]}))
                _require(receipt.is_stored, receipt.reason)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(work())
        return {"seconds": time.perf_counter() - began, "messages": messages}

    async def send_one(self, subject: str, messages: int, size: int) -> dict[str, Any]:
        """Send one message at a time."""
        producer = await self._opened()
        contents = texts(size)
        times = []
        for number in range(messages):
            began = time.perf_counter()
            receipt = await producer.send(qmq.Message(subject, {PROPERTY: contents[number & 63]}))
            times.append((time.perf_counter() - began) * 1e3)
            _require(receipt.is_stored, receipt.reason)
        return {"seconds": sum(times) / 1e3, "messages": messages, **percentiles(times)}

    async def pace(self, subject: str, messages: int, per_second: int) -> dict[str, Any]:
        """Send at a steady rate; each message holds its time, by the clock shared by all processes of a machine."""
        return await self._pace([subject], messages, per_second)

    async def pace_subjects(self, prefix: str, subjects: int, messages: int, per_second: int) -> dict[str, Any]:
        """Send at a steady rate to one subject after the other."""
        return await self._pace([f"{prefix}.{number}" for number in range(subjects)], messages, per_second)

    async def _pace(self, subjects: list[str], messages: int, per_second: int) -> dict[str, Any]:
        producer = await self._opened()
        failed: list[str] = []

        def done(receipt: qmq.Receipt) -> None:
            if not receipt.is_stored:
                failed.append(receipt.reason)

        began = time.monotonic()
        for number in range(messages):
            if (wait_s := began + number / per_second - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            subject = subjects[number % len(subjects)]
            producer.send_nowait(qmq.Message(subject, {PROPERTY: str(time.monotonic())}), done)
        seconds = time.monotonic() - began
        _require(not failed, failed[0] if failed else "")
        return {"seconds": seconds, "messages": messages}

    async def drain(self, subject: str, group: str, messages: int, tags: Sequence[str] = ()) -> dict[str, Any]:
        """Pull a backlog and ack it; at the end the broker has stored the last ack. Messages are not decoded."""
        began, taken = time.perf_counter(), 0
        async with self._consumer().pull(subject, group=group, start="earliest", tags=tags) as puller:
            while taken < messages:
                pulled = await puller.pull(1_000, timeout=30.0)
                _require(bool(pulled), f"no message for 30 s after {taken} of {messages}")
                taken += len(pulled)
                await puller.ack(pulled)
            await puller.flush()
            seconds = time.perf_counter() - began
        return {"seconds": seconds, "messages": taken}

    async def listen(
        self, subject: str, group: str, messages: int, concurrency: int = 1, is_body: bool = False
    ) -> dict[str, Any]:
        """Consume the same with a listener that reads each message's content."""
        consumer, everything = self._consumer(), asyncio.Event()
        taken = size = 0

        @consumer.listen(subject, group=group, start="earliest", concurrency=concurrency)
        async def on_message(message: qmq.Message) -> None:
            nonlocal taken, size
            taken += 1
            size += len(message.body or b"") if is_body else len(str(message[PROPERTY]))
            if taken == messages:
                everything.set()

        began = time.perf_counter()
        await _run_until(consumer, everything, 600.0)
        return {"seconds": time.perf_counter() - began, "messages": taken}

    async def produce_typed(self, subject: str, messages: int) -> dict[str, Any]:
        """Send models of pydantic."""
        from benchmarks.model import Order, make_order

        producer = await self._opened()
        orders = [make_order(number) for number in range(messages)]
        began = time.perf_counter()
        receipts = await producer.send_many(subject, orders)
        seconds = time.perf_counter() - began
        _require(receipts.all_stored and isinstance(orders[0], Order), "an order was not stored")
        return {"seconds": seconds, "messages": messages}

    async def listen_typed(
        self, subject: str, group: str, messages: int, concurrency: int, is_typed: bool
    ) -> dict[str, Any]:
        """Consume the models, or the same messages with a handler that reads their bodies."""
        from benchmarks.model import Order

        consumer, everything = self._consumer(), asyncio.Event()
        taken = 0

        def count() -> None:
            nonlocal taken
            taken += 1
            if taken == messages:
                everything.set()

        async def on_order(order: Order) -> None:
            count()

        async def on_body(body: bytes) -> None:
            count()

        consumer.listen(subject, group=group, start="earliest", concurrency=concurrency)(
            on_order if is_typed else on_body
        )
        began = time.perf_counter()
        await _run_until(consumer, everything, 600.0)
        return {"seconds": time.perf_counter() - began, "messages": taken}

    async def latency(self, subject: str, group: str, messages: int, skipped: int) -> dict[str, Any]:
        """Listen to the messages of `pace`; the first `skipped` ones waited for this listener and are not counted."""
        return await self._latency([subject], group, messages, skipped)

    async def latency_subjects(
        self, prefix: str, subjects: int, group: str, messages: int, skipped: int
    ) -> dict[str, Any]:
        """Listen to many subjects, with a listener each."""
        return await self._latency([f"{prefix}.{number}" for number in range(subjects)], group, messages, skipped)

    async def _latency(self, subjects: list[str], group: str, messages: int, skipped: int) -> dict[str, Any]:
        consumer, everything = self._consumer(), asyncio.Event()
        times: list[float] = []

        async def on_message(message: qmq.Message) -> None:
            times.append((time.monotonic() - float(str(message[PROPERTY]))) * 1e3)
            if len(times) == messages:
                everything.set()

        for subject in subjects:
            consumer.listen(subject, group=group, start="earliest")(on_message)
        await _run_until(consumer, everything, 600.0)
        return {"messages": len(times) - skipped, **percentiles(times[skipped:])}


async def _run_until(consumer: qmq.Consumer, everything: asyncio.Event, timeout_s: float) -> None:
    running = asyncio.create_task(consumer.run())
    waiting = asyncio.create_task(everything.wait())
    await asyncio.wait([running, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    _require(waiting.done(), "the listener did not get all messages")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50_ms": percentile(ordered, 0.5), "p99_ms": percentile(ordered, 0.99), "max_ms": ordered[-1]}


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise QmqError(f"benchmark: {complaint}")


if __name__ == "__main__":
    uvloop.run(Client(sys.argv[1]).serve())
