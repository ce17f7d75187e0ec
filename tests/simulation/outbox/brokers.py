"""Broker groups in memory, and their routes as the drains of an outbox see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from qmq.client.batch import Answer, NotStored, NumberedBatch, Stored, Unknown
from qmq.client.routes import group_of_key
from qmq.codec import decode_envelope, labels_bytes, split_batch
from qmq.errors import BrokerReadOnly, NotMaster

REFUSED = "refused-"
"""Prefix of ids that brokers refuse."""
NUMBERS_KEPT = 64
"""A broker remembers so many batches of a producer."""


class BrokerGroup:
    """Broker group that stores a batch once, as long as it remembers the batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "writable"
        self.stored: list[str] = []
        """Ids of the stored messages."""
        self._batches: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        """Producer -> number -> (first sequence, count)."""

    def produce(self, batch: NumberedBatch) -> Answer:
        """Store a batch and answer as a broker does."""
        if self.state == "down":
            return Unknown("the group is down")
        ids = _ids(batch)
        refused = [(at, "no broker takes it") for at, id in enumerate(ids) if id.startswith(REFUSED)]
        known = self._batches[batch.producer]
        if batch.number in known:
            return Stored(*known[batch.number], refused)
        if known and batch.number + NUMBERS_KEPT <= max(known):
            return Unknown("the number is too old")
        if self.state == "readonly":
            return NotStored(BrokerReadOnly("no slave"))
        if self.state == "moved":
            return NotStored(NotMaster("another broker is master"))
        first, good = len(self.stored), [id for id in ids if not id.startswith(REFUSED)]
        self.stored += good
        if good:
            known[batch.number] = first, len(good)
            if len(known) > NUMBERS_KEPT:
                del known[min(known)]
        return Stored(first, len(good), refused)


def _ids(batch: NumberedBatch) -> list[str]:
    body = b"".join(bytes(block) for block in batch.blocks)
    if batch.flags:
        body = body[: -labels_bytes(batch.count)]
    return [decode_envelope(bytes(message)).id for message in split_batch(body, batch.count)]


class Routes:
    """Broker groups as drains see them (`BatchSender`). They see each change at once, and send later."""

    def __init__(self, groups: Mapping[str, BrokerGroup]) -> None:
        self._groups = groups

    def watch(self, subject: str) -> None: ...

    def groups(self, subject: str) -> list[str]:
        return [name for name, group in self._groups.items() if group.state == "writable"]

    def home(self, subject: str, label: int) -> str | None:
        return group_of_key(label >> 32, sorted(self._groups))

    def is_usable(self, name: str) -> bool:
        return self._groups[name].state in ("writable", "readonly")

    def is_any_usable(self) -> bool:
        return any(map(self.is_usable, self._groups))

    def room(self, name: str) -> int:
        return 100_000

    def in_flight(self, name: str) -> int:
        return 0

    def why_not(self, subject: str) -> str:
        return "no group is usable"
