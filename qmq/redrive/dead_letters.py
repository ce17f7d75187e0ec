"""Shell. Connection to the master of a broker group, over which dead letters are read and returned to their group.

It sends its requests directly to the broker. If a pull that does not wait gets "no message", all were delivered.
Messages that return to their group go to the same broker as the same bytes. Messages for another subject go to one of
its masters, batch after batch, in order.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple

from qmq.codec import encode_labels, join_batch, with_subject
from qmq.crc import crc32
from qmq.dead_letters import REDRIVER
from qmq.errors import OutcomeUnknown, QmqError
from qmq.log.frame import label_flags
from qmq.message_sizes import ANSWER_BYTES_MAX, LARGE_BYTES_MIN
from qmq.redrive.redriving import Chosen, ranges_of
from qmq.remoting import commands
from qmq.remoting.commands import RANGES_MAX, Ack, Command, Nack, NackEntry, Piece, Produced, Pull, Verdict
from qmq.remoting.connection import Connection, connect
from qmq.remoting.packet import Packet
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Endpoint

APP = "qmq.redrive"
ANSWER_S = 10.0
PULL_MESSAGES, PULL_BYTES = 1_000, 4 << 20
BATCH_BYTES_MAX = 1 << 20
OVERHEAD_BYTES = 16 << 10
"""Part of a packet around a batch: names, end offsets and labels of up to 500 messages."""
UNSUBSCRIBE_S = 2.0
PASSED_MS = 600_000
"""Delay after which skipped messages are delivered again. They must not return while the rest is read."""


class Master(NamedTuple):
    """Address of a broker group's master."""

    broker_group: str
    ip: str
    serve_port: int
    control_port: int


class Destination(NamedTuple):
    """Destination of dead letters that do not return to their consumer group."""

    subject: str
    master: Master

    @classmethod
    def of(cls, subject: str, masters: Sequence[Master], broker_group: str) -> Destination:
        """Return a destination among the masters of `subject`, which are not empty: that of `broker_group`, or else
        always the same.
        """
        return cls(subject, next((master for master in masters if master.broker_group == broker_group), min(masters)))


class DeadLetters:
    """Dead letters of (subject, group) that one master delivers. Made by `open`; `close` returns those that were not
    settled.
    """

    def __init__(self, broker_group: str, subject: str, group: str, to: str, source: str) -> None:
        self.broker_group = broker_group
        self._dead = source or dead_letter_subject(subject, group)
        self._retry = retry_subject(subject, group)
        self._goes_to = to or self._retry
        self._producer = secrets.randbits(63) | 1
        self._batch = 0
        self._subscription = 0
        self.batch_bytes_max: int = BATCH_BYTES_MAX
        self._connection: Connection
        self._produce_connection: Connection
        """Connection to the destination."""
        self._beat: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, master: Master, token: str, subject: str, group: str, to: Destination | None = None, source: str = ""
    ) -> DeadLetters:
        """Connect and subscribe. `to`: destination other than the group; `source`: subject with the dead letters, if an
        operator set one. Raises QmqError.
        """
        self = cls(master.broker_group, subject, group, to.subject if to is not None else "", source)
        self._connection = self._produce_connection = await self._connect(master, token)
        try:
            if to is not None and to.master.broker_group != master.broker_group:
                self._produce_connection = await self._connect(to.master, token)
            answer = commands.decode_json(await self._ask(Command.SUBSCRIBE, self._terms()), subscription=int)
        except BaseException:
            self._disconnect("not subscribed")
            raise
        self._subscription = answer["subscription"]
        self._beat = asyncio.create_task(self._renew_lease(int(answer["lease_ms"]) / 3_000))
        return self

    async def _connect(self, master: Master, token: str) -> Connection:
        connection, welcome = await connect(
            Endpoint(master.ip, master.serve_port),
            handler=self,
            token=token,
            app=APP,
            packet_bytes_max=ANSWER_BYTES_MAX,
            timeout_s=ANSWER_S,
        )
        limits = [int(str(welcome[name])) for name in ("packet_bytes_max", "window_bytes")]
        self.batch_bytes_max = min(self.batch_bytes_max, min(limits) - OVERHEAD_BYTES)
        return connection

    def _disconnect(self, why: str) -> None:
        for connection in {self._connection, self._produce_connection}:
            connection.close(why)

    def _terms(self) -> bytes:
        # A unique name: two Redrives at once share the dead letters, and none is delivered to both.
        consumer = f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
        return commands.encode_subscribe(subject=self._dead, group=REDRIVER, consumer=consumer, start="earliest")

    async def take(self) -> list[Piece]:
        """Return more dead letters, which stay unacked until `close`; none at the end. Raises QmqError."""
        pull = Pull(self._subscription, PULL_MESSAGES, PULL_BYTES, 0)
        return list(commands.decode_pulled(await self._ask(Command.PULL, commands.encode_pull(pull))))

    async def send_back(self, letters: Sequence[Chosen]) -> Produced:
        """Store the messages at their destination; return their sequences and the refused ones.

        Raises:
            OutcomeUnknown: they may be stored.
            QmqError: none is stored.
        """
        self._batch += 1
        is_theirs = self._goes_to == self._retry
        body = join_batch(
            [letter.data if is_theirs else with_subject(letter.data, self._goes_to) for letter in letters]
        )
        flags = 0
        labels = [letter.label for letter in letters]
        if any(labels):
            body, flags = body + encode_labels(labels), label_flags(labels)
        head = commands.produce_header(self._producer, self._batch, len(letters), crc32(body), self._goes_to, flags)
        return commands.decode_produced(
            await self._ask(Command.PRODUCE, head, body, connection=self._produce_connection)
        )

    async def settle(self, letters: Sequence[Chosen]) -> None:
        """Ack the dead letters; raises QmqError if the ack may be lost."""
        await self._ask(Command.ACK, commands.encode_ack(Ack(self._subscription, ranges_of(letters))))

    async def pass_over(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Return dead letters that were not chosen, so that the broker delivers later ones. Raises QmqError."""
        for begin in range(0, len(ranges), RANGES_MAX):
            entries = [NackEntry(*range_, PASSED_MS, Verdict.RETRY) for range_ in ranges[begin : begin + RANGES_MAX]]
            await self._ask(Command.NACK, commands.encode_nack(Nack(self._subscription, entries, "passed over")))

    async def close(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        leave = commands.encode_json(subscription=self._subscription)
        try:
            async with asyncio.timeout(UNSUBSCRIBE_S):
                await self._connection.request(Command.UNSUBSCRIBE, leave)
        except (QmqError, TimeoutError):
            pass  # the broker returns them when the lease ends
        self._disconnect("done")

    async def _ask(self, command: Command, *parts: bytes, connection: Connection | None = None) -> memoryview:
        connection = connection or self._connection
        answer, moved_bytes = connection.request(command, *parts), connection.received_bytes - connection.unsent_bytes
        while not (await asyncio.wait({answer}, timeout=ANSWER_S))[0]:
            # 64 MiB on a slow link take longer than ANSWER_S. Answers to heartbeats are no progress.
            least, moved_bytes = moved_bytes + LARGE_BYTES_MIN, connection.received_bytes - connection.unsent_bytes
            if moved_bytes < least:
                raise OutcomeUnknown(f"{self.broker_group} did not answer within {ANSWER_S:.0f} s")
        return answer.result()

    async def _renew_lease(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            for connection in {self._connection, self._produce_connection}:
                connection.request(Command.HEARTBEAT)

    # Callback of the connection; the next call raises the error.

    def packet_received(self, connection: Connection, packet: Packet) -> None: ...

    def connection_lost(self, connection: Connection, reason: str) -> None: ...

    def writable_again(self, connection: Connection) -> None: ...
