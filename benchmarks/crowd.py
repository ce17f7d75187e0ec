"""Shell. Many consumers in one process, each on its own connection: the broker's cost for them, and nothing else.

They speak the protocol directly, one pull at a time, so that a thousand of them cost this process little.
`benchmarks.client` measures the library.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import uvloop

from benchmarks.client import PROPERTY, percentiles
from benchmarks.worker import answer
from qmq.codec import decode_message, split_batch
from qmq.errors import QmqError
from qmq.message_sizes import ANSWER_BYTES_MAX
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command, Pull
from qmq.remoting.connection import Connection, connect
from qmq.remoting.packet import Packet
from qmq.types import Endpoint

PULL_S = 10.0
HEARTBEAT_S = 5.0
OPENED_AT_ONCE = 50
STALLED_PULLS = 32
STALLED_PULL_BYTES = 1 << 20


class Member:
    """One consumer. `times` gets the milliseconds of each message from `pace` to here."""

    def __init__(self, subject: str, group: str, name: str, times: list[float] | None) -> None:
        self._subject = subject
        self._group = group
        self._name = name
        self._times = times
        self._subscription = 0
        self._connection: Connection | None = None
        self._is_over = False
        self.taken = 0

    async def open(self, endpoint: Endpoint, token: str, start: str) -> None:
        self._connection, _ = await connect(
            endpoint, handler=self, token=token, app="crowd", packet_bytes_max=ANSWER_BYTES_MAX, timeout_s=30.0
        )
        body = commands.encode_subscribe(subject=self._subject, group=self._group, consumer=self._name, start=start)
        answered = commands.decode_json(await self._connection.request(Command.SUBSCRIBE, body), subscription=int)
        self._subscription = answered["subscription"]

    @property
    def _open(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def heartbeat(self) -> None:
        self._open.ask(lambda _: None, Command.HEARTBEAT)

    def pull(self, messages: int = 100, bytes_max: int = STALLED_PULL_BYTES, timeout_s: float = PULL_S) -> None:
        """Pull in a loop."""
        pull = Pull(self._subscription, messages, bytes_max, int(timeout_s * 1000))
        self._open.ask(self._pulled, Command.PULL, commands.encode_pull(pull))

    async def drain(self, per_second: float) -> None:
        """Pull at a steady rate until cancelled."""
        began = time.monotonic()
        while True:
            body = commands.encode_pull(Pull(self._subscription, 500, STALLED_PULL_BYTES, int(PULL_S * 1000)))
            self._take(await self._open.request(Command.PULL, body))
            await asyncio.sleep(max(0.0, began + self.taken / per_second - time.monotonic()))

    def stall(self) -> None:
        """Request much and read none of it."""
        for _ in range(STALLED_PULLS):
            self.pull(1_000, timeout_s=600.0)
        self._open.read(False)

    async def close(self) -> None:
        self._is_over = True
        self._open.read(True)
        try:
            body = commands.encode_json(subscription=self._subscription)
            await asyncio.wait_for(self._open.request(Command.UNSUBSCRIBE, body), 10.0)
        except (QmqError, TimeoutError):
            pass  # its lease or its connection ended
        self._open.close()

    def _pulled(self, body: memoryview | QmqError) -> None:
        if self._is_over:
            return
        if isinstance(body, QmqError):
            print(f"{self._name}: {body}", file=sys.stderr, flush=True)
            return
        self._take(body)
        self.pull()

    def _take(self, body: memoryview) -> None:
        now = time.monotonic()
        for piece in commands.decode_pulled(body):
            self.taken += piece.count
            if self._times is not None and piece.times == 1:  # a redelivery waited for a stalled consumer
                for data in split_batch(piece.body, piece.count):
                    self._times.append((now - float(str(decode_message(bytes(data))[PROPERTY]))) * 1e3)
            ack = Ack(self._subscription, [(piece.pull_sequence, piece.pull_sequence + piece.count)])
            self._open.ask(lambda _: None, Command.ACK, commands.encode_ack(ack))

    def packet_received(self, connection: Connection, packet: Packet) -> None: ...

    def connection_lost(self, connection: Connection, reason: str) -> None: ...

    def writable_again(self, connection: Connection) -> None: ...


class Crowd:
    """The worker's actions; consumers stay under the name of their join until they leave."""

    def __init__(self, port: int, token: str) -> None:
        self._endpoint = Endpoint("127.0.0.1", port)
        self._token = token
        self._members: dict[str, list[Member]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._times: list[float] = []

    async def serve(self) -> None:
        beating = asyncio.create_task(self._beat())
        await answer(
            {
                "join": self.join,
                "stall": self.stall,
                "drain": self.drain,
                "leave": self.leave,
                "latencies": self.latencies,
            }
        )
        beating.cancel()

    async def join(self, name: str, subject: str, groups: int, consumers: int, is_measured: bool) -> dict[str, Any]:
        """Add `consumers` to each of several groups of the subject; they get new messages only."""
        times = self._times if is_measured else None
        members = [
            Member(subject, f"{name}-{group}", f"{name}-{group}-{number}", times)
            for group in range(groups)
            for number in range(consumers)
        ]
        self._members[name] = members
        for begin in range(0, len(members), OPENED_AT_ONCE):
            some = members[begin : begin + OPENED_AT_ONCE]
            await asyncio.gather(*(member.open(self._endpoint, self._token, "latest") for member in some))
        for member in members:
            member.pull()
        return {"consumers": len(members)}

    async def stall(self, name: str, subject: str, group: str) -> dict[str, Any]:
        """Add a consumer that requests much and reads none of it."""
        self._members[name] = [Member(subject, group, name, None)]
        await self._members[name][0].open(self._endpoint, self._token, "latest")
        self._members[name][0].stall()
        return {}

    async def drain(self, name: str, subject: str, per_second: float) -> dict[str, Any]:
        """Begin to consume the subject's backlog at a steady rate."""
        member = Member(subject, name, name, None)
        self._members[name] = [member]
        await member.open(self._endpoint, self._token, "earliest")
        self._tasks[name] = asyncio.create_task(member.drain(per_second))
        return {}

    async def leave(self, name: str) -> dict[str, Any]:
        """End these consumers; return the number of messages they took."""
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
        members = self._members.pop(name)
        for begin in range(0, len(members), OPENED_AT_ONCE):
            await asyncio.gather(*(member.close() for member in members[begin : begin + OPENED_AT_ONCE]))
        return {"taken": sum(member.taken for member in members)}

    async def latencies(self) -> dict[str, Any]:
        """Return and reset the measurements."""
        times, self._times[:] = self._times[:], []
        return {"messages": len(times), **(percentiles(times) if times else {})}

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for members in list(self._members.values()):
                for member in members:
                    member.heartbeat()


if __name__ == "__main__":
    uvloop.run(Crowd(int(sys.argv[1]), os.environ["QMQ_TOKEN"]).serve())
