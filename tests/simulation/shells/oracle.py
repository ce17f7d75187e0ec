"""Laws of messages, as users of the shipped client see them. Invariants have the numbers of ARCHITECTURE.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qmq import Message
from qmq.client.batch import Receipt
from qmq.client.received import ReceivedMessage
from qmq.codec import decode_message, split_batch
from qmq.errors import CorruptFrame
from qmq.log import MessageLog
from tests.simulation.events import Violation
from tests.simulation.ledger import Ledger, Place
from tests.simulation.shells.applications import UNREADABLE
from tests.simulation.shells.stand_ins import SINCE_1970_S
from tests.simulation.states import illegal_moves

if TYPE_CHECKING:
    from tests.simulation.shells.world import World


class Oracle(Ledger):
    """Made per seed. Applications report to it; a broken promise ends the run."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._illegal = illegal_moves()
        self.waiting: dict[str, tuple[str, int]] = {}
        """Message id -> (producer, number of its process)."""
        self.delayed: dict[str, float] = {}
        """Message id -> due time in seconds since 1970, once it is sent."""
        self.kept: set[str] = set()
        """Acknowledged messages of `delayed`."""
        self.rows: set[str] = set()
        """Ids given to transactions; the shop's database has those that were committed."""
        self.producers: set[int] = set()
        """Ids of the shop's producers, which send rows that drains may send again."""
        self._drained: dict[str, Place] = {}
        self.keyed: dict[tuple[str, str], dict[str, tuple[str, str, int]]] = {}
        """(subject, order key) -> acknowledged messages with this key."""
        self.done: set[str] = set()
        self._stored: dict[str, str] = {}
        """Message id -> group with it in its log; without delayed ones."""
        self._sent_on: set[str] = set()
        """Messages of delay servers and outboxes that a broker group has."""
        self._sent_after: dict[str, tuple[str, str, int] | None] = {}
        self._last_acked: dict[tuple[str, str], tuple[str, str, int]] = {}

    # Reports of applications.

    def _try(self, note: Callable[[str, Place], None], id: str, place: Place) -> None:
        try:
            note(id, place)
        except Violation as broken:
            self._world.fail(str(broken))

    def begin_send(self, name: str, message: Message, due_s: float | None) -> None:
        if due_s is not None:
            self.delayed[message.id] = due_s
        self.waiting[message.id] = name, self._world.machine(name).starts
        self.sent[message.id] = message.subject
        self._sent_after[message.id] = self._last_acked.get((name, message.subject))

    def staged(self, messages: list[Message]) -> None:
        for message in messages:
            self.rows.add(message.id)
            self.sent[message.id] = message.subject

    def end_send(self, name: str, message: Message, receipt: Receipt) -> None:
        self.waiting.pop(message.id)
        self._world.note(f"{name} {message.id} {receipt.outcome} {receipt.sequence}")
        if not receipt.is_stored:
            self._world.counts["not stored"] += 1
            return
        place = message.subject, receipt.broker_group, receipt.sequence
        self._check_disks(message.id, receipt.broker_group)
        if message.id in self.delayed:
            self.kept.add(message.id)
            self._world.counts["delayed"] += 1
            return
        self._try(self.note_receipt, message.id, place)
        if message.order_key is not None:
            self.keyed.setdefault((message.subject, message.order_key), {})[message.id] = place
        before = self._sent_after[message.id]
        if before is not None and before[1] == place[1] and before[2] >= place[2]:
            self._world.fail(f"order: {message.id} was sent when {before} was acknowledged, and is at {place}")
        last = self._last_acked.get((name, message.subject))
        if last is None or last[2] < place[2]:
            self._last_acked[name, message.subject] = place

    def _check_disks(self, id: str, group: str) -> None:
        """Check that enough disks have the message, or had it before they lost bytes."""
        what = id.encode()
        systems = {copy.name: copy.system for copy in self._world.groups[group]}
        disks = [name for name, system in systems.items() if system.has_durable(what) or system.has_lost(what)]
        if len(disks) < (self._world.swarm.min_copies if group == "g1" else 2):
            self._world.fail(f"I1: {id} is acknowledged by {group}, and only the disks of {disks} have it")

    def begun(self, name: str, message: ReceivedMessage) -> None:
        self._world.note(f"{name} gets {message.id} {message.times}")
        if message.times > 1:
            self._world.counts["came again"] += 1
        self._try(self.note_delivery, message.id, (message.subject, message.broker_group, message.sequence))
        if message.properties.get("text") != message.id:
            self._world.fail(f"I3: {name} received {message.id} with other content")
        if message.id in self.rows and message.id not in self._world.shop.orders():
            self._world.fail(f"outbox: {name} received {message.id}, whose transaction was not committed")
        early_s = self.delayed.get(message.id, 0.0) - SINCE_1970_S - self._world.loop.now_s
        if early_s > 0 and not self._world.counts["clock"]:
            self._world.fail(f"I11: {name} received {message.id} {early_s:.3f} s before it is due")
        if message.order_key is not None:
            self._check_key(name, message)

    def _check_key(self, name: str, message: ReceivedMessage) -> None:
        """Check that earlier messages of the key are done (I24)."""
        for text, (subject, group, sequence) in self.keyed.get((message.subject, message.order_key or ""), {}).items():
            before = (subject, group) == (message.subject, message.broker_group) and sequence < message.sequence
            if before and text not in self.done:
                self._world.fail(f"I24: {name} received {message.id} of key {message.order_key} before {text} was done")

    def consumed(self, name: str, message: ReceivedMessage) -> None:
        self.done.add(message.id)
        if message.order_key is not None:
            self.keyed.get((message.subject, message.order_key), {}).pop(message.id, None)

    # Checks of the world.

    def check_always(self) -> None:
        if illegal_moves() != self._illegal:
            self._world.fail("states: an illegal move")

    @property
    def missing(self) -> set[str]:
        """Return messages that were acknowledged, or committed with an outbox, and not consumed."""
        return (self.acked.keys() | self.kept | self._world.shop.orders()) - self.done

    @property
    def forgotten(self) -> set[str]:
        """Return messages without an outcome and with a running producer."""
        return {
            text
            for text, (name, life) in self.waiting.items()
            if self._world.machine(name).starts == life and self._world.machine(name).is_running
        }

    def check_logs(self, group: str, logs: dict[str, MessageLog]) -> None:
        """Check at the end that each copy has each acknowledged message once, at the place in its receipt.

        Messages of delay servers may be stored twice, anywhere: a batch of unknown outcome is sent again. Rows of the
        outbox may be stored by their producer, and once more by a drain.
        """
        may_repeat = self.delayed.keys() | self.rows
        for name, message_log in logs.items():
            if (producers := self._read(name, group, message_log)) is None:
                continue
            found = {place: id for place, (id, _) in producers.items()}
            try:
                self.check_stored(found, lambda place: place[1] == group, may_repeat)
            except Violation as broken:
                raise Violation(f"{broken}, in the log of {name}") from None
            for place, (id, producer) in producers.items():
                if id in self.rows and producer not in self.producers:
                    if (other := self._drained.setdefault(id, place)) != place:
                        raise Violation(f"I18: drains stored {id} at {other} and at {place}")
            self._sent_on |= may_repeat & set(found.values())
            for id in set(found.values()) - may_repeat:
                if (elsewhere := self._stored.setdefault(id, group)) != group:
                    raise Violation(f"I18: {id} is stored in {elsewhere} and in {group}")

    def _read(self, name: str, group: str, message_log: MessageLog) -> dict[Place, tuple[str, int]] | None:
        """Return place -> (id, producer) of all messages of a copy; None: it has a flipped bit that no process has read
        yet.
        """
        try:
            return {
                (subject, group, sequence): (id, producer)
                for subject in sorted(set(self.sent.values()))
                for id, sequence, producer in stored(message_log, subject)
            }
        except CorruptFrame:
            if not self._world.copy(name).medium.flipped:
                raise
            self._world.counts["unread damage"] += 1
            return None

    def check_whole(self) -> None:
        if lost := (self.kept | self._world.shop.orders()) - self._sent_on:
            raise Violation(f"I11: {sorted(lost)[:5]} of {len(lost)} were acknowledged or committed; no group has them")

    def check_parked(self, rows: list[tuple[str, str, str | None]]) -> None:
        """Check that rows that are no messages are parked with a reason, and no others; row: content, reason, claim."""
        if wrong := [row for row in rows if row[0] != UNREADABLE or not row[1] or row[2] is not None]:
            raise Violation(f"outbox: rows are parked that are messages, without a reason, or with a claim: {wrong}")
        if len(rows) != (written := self._world.counts["unreadable row"]):
            raise Violation(f"outbox: {len(rows)} rows are parked, not {written}")


def stored(message_log: MessageLog, subject: str) -> list[tuple[str, int, int]]:
    """Return (id, sequence, producer) of all messages of a subject."""
    found = []
    for ref in message_log.frames(subject, 0, 1 << 30):
        frame, body = message_log.tail_body(ref.offset) or message_log.stored.read_bodies([ref])[0]
        for at, data in enumerate(split_batch(body, frame.count)):
            found.append((str(decode_message(bytes(data)).id), ref.begin + at, frame.producer))
    return found
