"""Shell. In-memory delay group: the real cores of both copies of a delay server, in front of the test's broker.

Its clock is the broker's, which tests advance; the clients' clocks are real. So due times are converted from the
clients' clock to the broker's.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from qmq.client.batch import Answer, NotStored, NumberedBatch, OnAnswer, Stored, Unknown
from qmq.codec import Buffer, batch_ends, decode_message
from qmq.crc import crc32
from qmq.delayserver.decisions import Counters
from qmq.delayserver.master import DelayMaster
from qmq.delayserver.schedule import Schedule, discard
from qmq.delayserver.schedule.record import Messages, read_messages
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.upkeep import ScheduleFiler
from qmq.errors import AccessError, AskAnotherBroker, CallError, QmqError, from_code
from qmq.log.memory_disk import MemoryDisk
from qmq.message import Message
from qmq.rations import Ration
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.packet import Packet
from qmq.replication.master import Promotion
from qmq.testing.copies import Acceptor, Clock, Copies, Copy

COMMANDS = frozenset({Command.PRODUCE, Command.CANCEL, Command.RESCHEDULE, Command.RECUR})
PASSES_MAX = 2_000
"""Number of passes of the loop within which due messages must reach the broker, unless it refuses them."""
ROOM_BYTES = 1 << 20
SETTINGS: DelaySettings = DelaySettings(
    hostname="test",
    data=Path("memory"),
    token="any",
    segment_bytes=1 << 20,
    slave_lag_ms_max=1 << 50,
)
_DUE_AT, _DUE = 9, struct.Struct(">q")
"""Offset of a message's due time (qmq.codec)."""


class DelayCopy(Copy[DelayMaster]):
    """Copy of a delay server: a log, and the schedule derived from it."""

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        happened: Callable[[], None],
        failed: Callable[[Exception], None],
        hatch: Hatch,
    ) -> None:
        def promote(promotion: Promotion) -> DelayMaster:
            return DelayMaster(promotion, SETTINGS, Counters(), self.filing, hatch)

        super().__init__(name, settings=SETTINGS, clock=clock, happened=happened, failed=failed, promote=promote)
        shelf, message_log = MemoryDisk(), self.node.log
        segment_ms, keep_ms = SETTINGS.segment_minutes * 60_000, int(SETTINGS.sent_hours * 3_600_000)

        def make(log_start: int) -> Schedule:
            return Schedule(shelf, segment_ms=segment_ms, log_start=log_start, keep_ms=keep_ms)

        self.filing: ScheduleFiler = ScheduleFiler(
            message_log, self, make=make, discard=lambda: discard(shelf), found_damage=self.node.found_damage
        )

    def tick(self) -> None:
        """Pass a tick of the clock to the core, which sends due messages."""
        super().tick()
        filing, message_log = self.filing, self.node.log
        if self.node.master is not None:
            self.node.master.beat()
        else:
            known = min(message_log.state.high_watermark, message_log.flushed_end)
            filing.go_on(max(known, filing.schedule.filed_end))
        filing.keep(self.now_ms())


class Hatch:
    """Sender of the delay server to the broker: a `BatchSender`, and a `Link` of the broker."""

    peer: str = "delay server"
    writable: bool = True
    is_open: bool = True

    def __init__(self, brokers: Copies[Any]) -> None:
        self._brokers = brokers
        self._asked: dict[int, OnAnswer] = {}
        self._opaque = 0
        self.unacked_bytes = self.owed_bytes = 0
        self.sends_on = False
        self.produced: dict[str, int] = {}
        self.ration: Ration = Ration()

    # For the delay servers.

    def watch(self, subject: str) -> None:
        """Do nothing, because the broker serves every subject."""

    def groups(self, subject: str) -> list[str]:
        is_open = self._brokers.is_ready and self._brokers.takes(subject)
        return [self._brokers.group] if is_open else []

    def home(self, subject: str, label: int) -> str | None:
        return self._brokers.group

    def sharers(self, subject: str) -> list[str]:
        return [self._brokers.group]

    def is_usable(self, name: str) -> bool:
        return self._brokers.is_ready

    def is_any_usable(self) -> bool:
        return True

    def room(self, name: str) -> int:
        return ROOM_BYTES

    def in_flight(self, name: str) -> int:
        return len(self._asked)

    def why_not(self, subject: str) -> str:
        return "the test has marked it readonly"

    def send(self, group: str, batch: NumberedBatch, done: OnAnswer) -> None:
        self._opaque += 1
        self._asked[self._opaque] = done
        header = commands.produce_header(
            batch.producer, batch.number, batch.count, batch.crc, batch.subject, batch.flags
        )
        body = memoryview(b"".join((header, *batch.blocks)))
        master = self._brokers.copies[0]
        master.soon(
            partial(master.node.packet_received, self, Packet(Command.PRODUCE, self._opaque, 0, Command.PRODUCE, body))
        )

    # For the broker.

    def answer(self, request: Packet, *parts: Buffer, code: int = 0) -> None:
        if code:
            self.refuse(request, from_code(code, str(b"".join(parts), "utf-8")))
        else:
            produced = commands.decode_produced(memoryview(b"".join(parts)))
            self._report(request, Stored(produced.first_sequence, produced.stored, produced.refused))

    def refuse(self, request: Packet, error: QmqError) -> None:
        is_sure = isinstance(error, AskAnotherBroker | CallError | AccessError)
        self._report(request, NotStored(error) if is_sure else Unknown(str(error)))

    def _report(self, request: Packet, answer: Answer) -> None:
        self._brokers.copies[0].soon(partial(self._asked.pop(request.opaque), answer))

    def push(self, command: Command, *parts: Buffer) -> None:
        """Do nothing, because a broker sends a producer no requests."""

    def close(self, reason: str = "") -> None:
        """Do nothing."""


class DelayAcceptor(Acceptor):
    """Port of the delay group, which converts due times from the clients' clock."""

    def __init__(self, copy: DelayCopy, *, clock: Clock, group: str, refusals: deque[QmqError]) -> None:
        super().__init__(copy, group=group, settings=SETTINGS, commands=COMMANDS, refusals=refusals)
        self._clock = clock

    def read(self, packet: Packet) -> Packet:
        skipped_ms = self._clock.skipped_ms
        try:
            if packet.code == Command.PRODUCE and skipped_ms:
                return packet._replace(body=memoryview(_put_forward(packet.body, skipped_ms)))
            if packet.code == Command.RESCHEDULE:
                reschedule = commands.decode_reschedule(packet.body)
                later = reschedule._replace(due_ms=reschedule.due_ms + skipped_ms)
                return packet._replace(body=memoryview(commands.encode_reschedule(later)))
        except QmqError:
            pass  # the core reports the fault
        return packet


def _put_forward(body: memoryview, ms: int) -> bytes:
    """Return the body of a PRODUCE with its messages due `ms` later."""
    produce = commands.decode_produce(body)
    batch, count = bytearray(produce.body), produce.count
    data = 4 * (count + 1)
    for begin in batch_ends(batch, count)[:-1]:
        at = data + begin + _DUE_AT
        if at + _DUE.size <= len(batch):
            _DUE.pack_into(batch, at, _DUE.unpack_from(batch, at)[0] + ms)
    header = commands.produce_header(
        produce.producer, produce.batch, count, crc32(batch), produce.subject, produce.flags
    )
    return header + batch


class Delays:
    """Delay group, made on the broker's loop for the first client that needs it; ends with the broker."""

    def __init__(
        self,
        brokers: Copies[Any],
        *,
        clock: Clock,
        happened: Callable[[], None],
        failed: Callable[[Exception], None],
        refusals: deque[QmqError],
    ) -> None:
        self.group: str = f"{brokers.group}-delay"
        self._clock, hatch = clock, Hatch(brokers)

        def make(name: str) -> DelayCopy:
            return DelayCopy(name, clock=clock, happened=happened, failed=failed, hatch=hatch)

        self._copies: Copies[DelayMaster] = Copies(self.group, make)
        master = self._copies.copies[0]
        assert isinstance(master, DelayCopy)
        self._master = master
        self.acceptors: list[DelayAcceptor] = [DelayAcceptor(master, clock=clock, group=self.group, refusals=refusals)]

    async def open(self) -> None:
        await self.acceptors[0].open()
        self._copies.begin_mastership()
        await self._copies.ready()

    @property
    def port(self) -> int:
        return self.acceptors[0].port

    def tick(self) -> None:
        self._copies.tick()

    def next_due_ms(self, within_ms: int) -> int:
        """Return the ms until the next message is due, at most `within_ms`."""
        now_ms = self._clock.now_ms()
        records = self._master.filing.schedule.list(now_ms + 1, now_ms + within_ms, None, 1)()
        return int(records["due"][0]) - now_ms if len(records) else within_ms

    def messages(self, subject: str) -> list[Message]:
        """Return the waiting messages, earliest due first."""
        records = self._master.filing.schedule.list(0, 1 << 62, subject, 1 << 30)()
        return [decode_message(data) for data in read_messages(self._copies.log, Messages.of(records))]

    async def caught_up(self) -> None:
        """Wait until all due messages were sent to the broker, unless it refuses them."""
        for _ in range(PASSES_MAX):
            self.tick()
            await asyncio.sleep(0)
            if not self._is_busy():
                return

    def _is_busy(self) -> bool:
        master, schedule, now_ms = self._copies.master, self._master.filing.schedule, self._clock.now_ms()
        stats = master.stats()
        is_filed = schedule.filed_end >= self._copies.log.end and schedule.loaded_until_ms > now_ms
        next_due_ms = stats["next_due_ms"]
        is_due = next_due_ms is not None and next_due_ms <= now_ms or stats["recurring_due"]
        is_waiting = any(not why for _, _, why in stats["overdue_subjects"].values())
        return not is_filed or bool(is_due) or is_waiting or bool(stats["in_flight_batches"])
