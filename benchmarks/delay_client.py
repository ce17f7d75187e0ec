"""Shell. Load of the delay server's benchmark: a sender of delayed batches and a receiver of due messages.

They speak the protocol directly, as `benchmarks.crowd` does, so that they cost little.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import uvloop

from benchmarks.crowd import Member
from benchmarks.figures import percentile
from benchmarks.worker import answer, texts
from qmq.codec import DUE_AT, FLAG_DELAYED, encode_message, join_batch, split_batch
from qmq.errors import QmqError
from qmq.message import Message
from qmq.message_sizes import ANSWER_BYTES_MAX
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command
from qmq.remoting.connection import Connection, connect
from qmq.remoting.packet import Packet
from qmq.types import Endpoint

BATCH = 100
IN_FLIGHT = 64
_DUE = struct.Struct(">q")
ID = "{:016x}"


class Template:
    """A batch that gets new ids and due times for each send."""

    def __init__(self, subject: str, size: int) -> None:
        content = texts(max(1, size - 80))[0]
        message = bytearray(encode_message(Message(subject, {"c": content}, id=ID.format(0)), 0))
        message[0] |= FLAG_DELAYED
        self.bytes = len(message)
        self._body = bytearray(join_batch([bytes(message)] * BATCH))
        self._data = 4 * (BATCH + 1)
        self._id_at = 19 + len(subject.encode()) + 2

    def batch(self, first: int, dues: list[int]) -> bytes:
        body, at = self._body, self._data
        for number, due in enumerate(dues, first):
            _DUE.pack_into(body, at + DUE_AT, due)
            body[at + self._id_at : at + self._id_at + 16] = ID.format(number).encode()
            at += self.bytes
        return bytes(body)


class Sender:
    """One connection to the master of a delay group."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: Connection | None = None
        self._producer = random.getrandbits(63) | 1
        self._number = self._first = 0

    async def open(self) -> Connection:
        if self._connection is None or not self._connection.is_open:
            self._connection, _ = await connect(
                Endpoint("127.0.0.1", self._port),
                handler=self,
                token=os.environ["QMQ_TOKEN"],
                app="delay",
                packet_bytes_max=ANSWER_BYTES_MAX,
                timeout_s=30.0,
            )
        return self._connection

    def packet_received(self, connection: Connection, packet: Packet) -> None: ...

    def connection_lost(self, connection: Connection, reason: str) -> None: ...

    def writable_again(self, connection: Connection) -> None: ...

    async def _send(self, subject: str, batches: Iterator[bytes]) -> list[float]:
        """Send batches, `IN_FLIGHT` at a time; return the seconds of each."""
        connection, room, took = await self.open(), asyncio.Semaphore(IN_FLIGHT), []
        wrong: list[str] = []

        def send(body: bytes) -> None:
            began = time.perf_counter()

            def answered(result: memoryview | QmqError) -> None:
                took.append(time.perf_counter() - began)
                room.release()
                if isinstance(result, QmqError):
                    wrong.append(str(result))
                elif (produced := commands.decode_produced(result)).stored != BATCH:
                    wrong.append(str(produced.refused[:1]))

            self._number += 1
            head = commands.produce_header(self._producer, self._number, BATCH, crc32(body), subject)
            connection.ask(answered, Command.PRODUCE, head, body)

        for body in batches:
            await room.acquire()
            send(body)
        for _ in range(IN_FLIGHT):
            await room.acquire()
        if wrong:
            raise QmqError(f"{len(wrong)} batches were not stored: {wrong[0]}")
        return took

    async def fill(self, subject: str, messages: int, begin_ms: int, span_ms: int, size: int = 200) -> dict[str, Any]:
        """Send messages that are due at random within a span."""
        template, dice = Template(subject, size), random.Random(messages)

        def batches() -> Iterator[bytes]:
            for _ in range(messages // BATCH):
                yield template.batch(self._first, [begin_ms + dice.randrange(span_ms) for _ in range(BATCH)])
                self._first += BATCH

        began = time.perf_counter()
        took = sorted(await self._send(subject, batches()))
        seconds = time.perf_counter() - began
        return {
            "messages": messages,
            "seconds": seconds,
            "message_bytes": template.bytes,
            "p50_ms": percentile(took, 0.5) * 1e3,
            "p99_ms": percentile(took, 0.99) * 1e3,
        }

    async def pace(self, subject: str, per_second: float, seconds: float, lead_ms: int) -> dict[str, Any]:
        """Send batches at a steady rate; their messages come due at that rate, `lead_ms` later."""
        template, sent = Template(subject, 200), []
        began, count, gap_ms = time.time(), 0, 1e3 / per_second
        while (count / per_second) < seconds:
            due = began * 1e3 + lead_ms + count * gap_ms
            body = template.batch(self._first, [int(due + i * gap_ms) for i in range(BATCH)])
            self._first += BATCH
            # In parallel: a slow store must not delay the next batches.
            sent.append(asyncio.create_task(self._send(subject, iter((body,)))))
            count += BATCH
            await asyncio.sleep(max(0.0, began + count / per_second - time.time()))
        took = sorted(seconds for each in await asyncio.gather(*sent) for seconds in each)
        return {"messages": count, "p50_ms": percentile(took, 0.5) * 1e3, "p99_ms": percentile(took, 0.99) * 1e3}


class Receiver(Member):
    """A consumer that records the lateness of each message, by this machine's clock."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject, "delay", "receiver", None)
        self.dues_ms: list[int] = []
        self.late_ms: list[float] = []

    def _take(self, body: memoryview) -> None:
        now_ms = time.time() * 1e3
        for piece in commands.decode_pulled(body):
            for data in split_batch(piece.body, piece.count):
                (due_ms,) = _DUE.unpack_from(data, DUE_AT)
                self.dues_ms.append(due_ms)
                self.late_ms.append(now_ms - due_ms)
            ack = Ack(self._subscription, [(piece.pull_sequence, piece.pull_sequence + piece.count)])
            self._open.ask(lambda _: None, Command.ACK, commands.encode_ack(ack))


async def receive(
    port: int, subject: str, messages: int, timeout_s: float, from_ms: int = 0, until_ms: int = 1 << 62
) -> dict[str, Any]:
    """Take messages until all have come; measure those that are due in `[from_ms, until_ms)`."""
    receiver = Receiver(subject)
    await receiver.open(Endpoint("127.0.0.1", port), os.environ["QMQ_TOKEN"], "earliest")
    for _ in range(4):
        receiver.pull(2_000)
    deadline = time.monotonic() + timeout_s
    while len(receiver.late_ms) < messages and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        receiver.heartbeat()
    await receiver.close()
    if len(receiver.late_ms) != messages:
        raise QmqError(f"{len(receiver.late_ms)} messages arrived, not {messages}")
    both = zip(receiver.dues_ms, receiver.late_ms, strict=True)
    late = sorted(late_ms for due_ms, late_ms in both if from_ms <= due_ms < until_ms)
    return {"p50_ms": percentile(late, 0.5), "p99_ms": percentile(late, 0.99), "min_ms": late[0], "max_ms": late[-1]}


async def main() -> None:
    delay_port, broker_port = int(sys.argv[1]), int(sys.argv[2])
    sender = Sender(delay_port)

    async def receive_from_broker(**request: Any) -> dict[str, Any]:
        return await receive(broker_port, **request)

    await answer({"fill": sender.fill, "pace": sender.pace, "receive": receive_from_broker})


if __name__ == "__main__":
    uvloop.run(main())
