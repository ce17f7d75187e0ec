"""Core. Shared state of one mastership: log, epoch, waiting requests, readonly reasons."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.errors import BrokerReadOnly, CorruptFrame, NotMaster, NotServed, QmqError
from qmq.log import MessageLog
from qmq.log.frame import FLAG_NO_SLAVE_IN_SYNC, Frame, FrameKind
from qmq.log.progress_frame import Entry, encode_progress
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate, Answer
from qmq.replication.ports import Host, Link
from qmq.replication.readonly import WAY_OUT, Reason
from qmq.replication.settings import CopySettings
from qmq.types import Epoch

log = logging.getLogger(__name__)

NEVER = sys.maxsize
"""Offset that no log reaches, for the end of the epoch frame until that is written: no frame counts before."""
_BY_THE_MASTERS_CLOCK = frozenset({FrameKind.NACK, FrameKind.DISPATCH})
"""Frames with timestamps that decide due times."""


class Readonly(set[Reason]):
    """Readonly reasons of one broker group; only `change` changes them. Ends with the mastership.

    Each check sets and clears only its own reason, so none can undo an operator's mark (I12).
    """

    def __init__(self) -> None:
        super().__init__()
        self._subjects: frozenset[str] = frozenset()

    def change(self, reason: Reason, holds: bool) -> bool:
        """Set or clear one reason; return whether that changed anything."""
        if holds == (reason in self):
            return False
        (self.add if holds else self.discard)(reason)
        return True

    def mark_subjects(self, subjects: frozenset[str]) -> None:
        """Replace the operators' marks; `*` is the whole group."""
        self._subjects = subjects - {"*"}
        self.change(Reason.OPERATOR, "*" in subjects)

    @property
    def reasons(self) -> list[str]:
        return sorted(self)

    @property
    def writable(self) -> bool:
        return not self

    def check(self, group: str, subject: str) -> None:
        """Raise BrokerReadOnly, with the reasons and their remedies, unless `subject` may be produced to."""
        if not self and subject not in self._subjects:
            return
        if not self:
            raise BrokerReadOnly(f"{group} is readonly for {subject}: {WAY_OUT[Reason.OPERATOR]}")
        why = "; ".join(f"{reason}, {WAY_OUT[reason]}" for reason in sorted(self))
        raise BrokerReadOnly(f"{group} is readonly: {why}")

    def check_change(self, group: str, subject: str) -> None:
        """Raise BrokerReadOnly as `check` does, but not for an operator's mark, which allows changes that add no
        messages.
        """
        if self - {Reason.OPERATOR}:
            self.check(group, subject)


@dataclass(slots=True)
class Mastership:
    """State of one mastership. Made by its master."""

    group: str
    epoch: Epoch
    log: MessageLog
    host: Host
    settings: CopySettings
    gate: AckGate
    readonly: Readonly = field(default_factory=Readonly)
    has_begun: bool = False
    """Whether the epoch frame is written. Before that, this master stores nothing."""
    before_progress: Callable[[FrameKind, tuple[str, str, str], list[Entry]], None] | None = None
    """Called right before a progress frame is appended, with the state still unchanged."""
    at_begin: Callable[[], None] | None = None
    """Called when the mastership begins. Until then, slaves may restore the log."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    """Longest body of a frame that all slaves read that have connected so far."""

    retry_begin_ms: int | None = None
    """Origin of `retry_ms`; set at its first use, as acting master."""

    def check_has_begun(self) -> None:
        if Reason.FENCED in self.readonly:
            raise NotMaster(f"{self.group} has a newer master: fetch the route again")
        if not self.has_begun:
            raise NotServed(f"the master of {self.group} waits for its slave")

    def check_may_store(self) -> None:
        """Raise NotMaster or BrokerReadOnly before the mastership has begun, when nothing may be stored."""
        try:
            self.check_has_begun()
        except NotServed as error:
            raise BrokerReadOnly(str(error)) from None

    def check_may_progress(self) -> None:
        self.check_has_begun()
        if Reason.DRAINING in self.readonly:
            raise NotServed(f"the roles of {self.group} are being swapped; repeat the request in a moment")

    @property
    def may_progress(self) -> bool:
        return self.has_begun and Reason.DRAINING not in self.readonly and Reason.FENCED not in self.readonly

    def retry_ms(self) -> int:
        """Return the time of the clock of retries: the wall clock at the mastership's begin, monotonic from there.

        Setting the wall clock during a mastership has no effect. If it is behind the former master's, the clock of
        retries begins at the time of the last nack, so no retry waits longer than its delay.
        """
        if self.retry_begin_ms is None:
            began_ms = max(self.host.now_ms(), self.log.state.retry_ms)
            self.retry_begin_ms = began_ms - self.host.monotonic_ms()
        return self.retry_begin_ms + self.host.monotonic_ms()

    def append(
        self,
        kind: FrameKind,
        subject: str,
        body: Buffer,
        *,
        flags: int = 0,
        count: int = 0,
        producer: int = 0,
        batch: int = 0,
    ) -> Frame:
        """Append a frame of the broker itself, not of a producer. It is marked while too few slaves are in sync."""
        self.host.pass_soon()
        return self.log.append(
            kind,
            subject,
            body,
            body_crc=crc32(body),
            epoch=self.epoch,
            high_watermark=self.gate.high_watermark,
            timestamp_ms=self.retry_ms() if kind in _BY_THE_MASTERS_CLOCK else self.host.now_ms(),
            flags=flags | FLAG_NO_SLAVE_IN_SYNC if self.gate.too_few_in_sync else flags,
            count=count,
            producer=producer,
            batch=batch,
        )

    def append_progress(self, kind: FrameKind, key: tuple[str, str, str], entries: list[Entry]) -> None:
        """Append progress of (subject, consumer group, consumer)."""
        if self.before_progress is not None:
            self.before_progress(kind, key, entries)
        subject, group, consumer = key
        self.append(kind, subject, encode_progress(group, consumer, entries))

    def answer_when_safe(self, link: Link, packet: Packet, body: bytes) -> None:
        """Answer a request about progress once all appended frames are safe."""
        self.gate.progress(self.log.end, 0, answering(link, packet, body))

    def found_damage(self, problem: CorruptFrame) -> None:
        """Set readonly until a damaged frame is repaired (P6)."""
        if not self.log.stored.is_damaged(problem):
            return
        self.readonly.change(Reason.CORRUPT, True)
        self.log.damaged_at(problem)
        log.error("log damaged group=%s offset=%d reason=%s", self.group, problem.offset, problem.reason)


def answering(link: Link, packet: Packet, body: bytes) -> Answer:
    """Return a callback that answers `packet` with `body`, or with the error that the callback gets."""

    def answer(error: QmqError | None) -> None:
        if error is None:
            link.answer(packet, body)
        else:
            link.refuse(packet, error)

    return answer
