"""Core. The kinds of findings, and of what is wrong they are the names.

Columns that the audit's tables take and give; what the words in them mean.

    findings   what string, copy string, offset long, end long, subject string, sequence long, id string, text string

`what` is an `audit.findings.Kind`, `copy` is "master", "slave", or "both" where both copies are wrong alike. To what is
reported, `audit.inspection` adds group, host, segment and epoch.

What judges say: findings, and what the driver needs to know of pieces and subjects. All of it can be JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from pyspark.sql.types import LongType, StringType, StructField, StructType

from qmq.ledger import ALIKE


class FindingKind(StrEnum):
    """What a finding says. The value stands in reports, results, tables and metrics."""

    # A copy by itself: bytes and their order.
    DAMAGED = "damaged"
    """Bytes that are no frame, or a frame whose body does not match its CRC."""
    REPAIRED = "repaired"
    """It was damaged when it was read, and the broker took it from the other copy since."""
    CHAIN = "chain"
    """A frame that does not continue the history before it."""
    SEQUENCE = "sequence"
    """A gap, a repeat, or another order in a subject."""
    EPOCH = "epoch"
    """An older epoch after a newer one."""
    EPOCH_FRAME = "epoch_frame"
    """An epoch whose first frame is not the one with which a mastership begins."""
    WATERMARK = "watermark"
    """A high watermark behind the frame that states it, or lower than one before."""
    TIME = "time"
    """A time that has not come yet, or that goes back within an epoch."""
    UNREAD = "unread"
    """Bytes below the high watermark that a copy did not give, without a word of damage."""
    REWOUND = "rewound"
    """The log ends before what an earlier run verified, or a subject does."""
    REWRITTEN = "rewritten"
    """The log is not the one that an earlier run verified."""
    RETENTION = "retention"
    """Frames are gone that no retention frame gave up, or one gives back what an earlier one gave up."""
    INDEX = "index"
    """An index beside a segment that does not follow from it."""
    SNAPSHOT = "snapshot"
    """A snapshot beside a segment that does not follow from the log before it."""

    # Messages.
    UNDECODABLE = "undecodable"
    """A message that no consumer can decode."""
    FOREIGN = "foreign"
    """A message of another subject than its frame's."""
    LABELS = "labels"
    """A label that is not the one of its message's tags and order key."""
    BATCH_TWICE = "batch_twice"
    """A batch stored twice under one producer id and batch number."""
    ID_TWICE = "id_twice"
    """A message id that one producer stored twice in a subject."""
    LOST = "lost"
    """Acknowledged to a producer, and absent."""
    ALTERED = "altered"
    """Acknowledged to a producer, and stored with another content."""

    # Consumption.
    PROGRESS = "progress"
    """A pull, ack or position that does not follow from the log."""
    POSITION = "position"
    """A consumer group that is put behind what the subject has."""
    CONSERVATION = "conservation"
    """A message that is in no state of a consumer group, or in two."""
    DEAD_ALTERED = "dead_altered"
    """A dead letter whose content is not its original's, or that says another number of deliveries."""
    DEAD_UNFOUNDED = "dead_unfounded"
    """A dead letter of a message that does not exist, or that its consumer group did not hold."""
    DEAD_TWICE = "dead_twice"
    """A second dead letter of one message and consumer group."""
    DEAD_MISSING = "dead_missing"
    """A message that was acked as dead, and has no dead letter."""
    PASSED = "passed"
    """Messages that were passed over although the consumer gets such messages."""

    # Of a delay server.
    EARLY = "early"
    """Planned before it was due."""
    TWICE = "twice"
    """Stored by broker groups in two batches."""
    UNSENT = "unsent"
    """Due long ago, and neither sent nor cancelled."""
    RECALLED = "recalled"
    """Planned after it was cancelled or written again."""

    # Between the copies.
    MISSING = "missing"
    """Frames that only the master has."""
    EXTRA = "extra"
    """Frames that only the slave has."""
    DIFFERENT = "different"
    """Another frame at this offset."""
    REORDERED = "reordered"
    """The same messages at another offset."""
    SHIFTED = "shifted"
    """The same frames, all of them by one distance further on or back."""
    HISTORY = "history"
    """Equal frames whose chains differ: the difference lies before what was compared."""


DERIVED = frozenset({FindingKind.INDEX, FindingKind.SNAPSHOT})
"""These are about files beside the log, at the offset of their segment, and about no frame."""

UNVERIFIED = frozenset(
    {FindingKind.REWOUND, FindingKind.REWRITTEN, FindingKind.UNREAD, FindingKind.LOST, FindingKind.ALTERED}
)
"""These hold on both copies alike, and yet what they were found in is not verified."""

FINDINGS_MAX = 1000
"""Findings of one kind listed in full; all are counted."""


def _struct(**fields: type[LongType] | type[StringType]) -> StructType:
    return StructType([StructField(name, kind()) for name, kind in fields.items()])


FINDINGS = _struct(
    what=StringType,
    copy=StringType,
    offset=LongType,
    end=LongType,
    subject=StringType,
    sequence=LongType,
    id=StringType,
    text=StringType,
)
JOURNAL = _struct(subject=StringType, group=StringType, sequence=LongType, id=StringType, hash=StringType)

MASTER, SLAVE = "master", "slave"
COPIES = (MASTER, SLAVE)
BOTH = ALIKE
COPIES_MIN = 2
"""So many copies acknowledge (`min_copies`), if nobody says otherwise; of a group with more, others may be behind."""


FINDING = "finding"
"""A row of `audit.findings.FINDINGS` without its copy, and for the driver

    seen    offset of what made it plain: behind damage of that copy it may follow from that
    due     of a gap: where the last frame of the subject before it ends; damage in between explains it
"""
MORE = "more"
"""{kind: findings of it that are counted and not listed}"""
PIECE = "piece"
"""begin, bytes, frames, messages, digest, apart: whether the copies have other bytes; and of its last frame, if it has
any: end, chain, size: its offset"""
SUBJECT = "subject"
"""subject, first: its first sequence, end: the one after its last, due_end: the same of what was promised"""
HOUR = "hour"
"""subject, hour since 1970 UTC, messages, bytes"""
ACCOUNT = "account"
"""subject, consumer_group, stored and each state of `audit.conservation`, nacked: of all hours together"""
EPOCHS = "epochs"
"""{epoch: offset where it begins}"""
KEPT = "kept"
"""from: frames are kept from here on, by the retention frames"""
UNREAD = "unread"
"""text: why a piece was not read"""

Row = dict[str, Any]


class JudgeRow(NamedTuple):
    """One thing that a judge says; its kind is one of the above, or `audit.consumption.CONSERVED`."""

    kind: str
    row: Row


class Judge(Protocol):
    """Takes what one copy says, piece after piece."""

    def take(self, piece: int, facts: Any, /) -> Iterable[JudgeRow]: ...

    def finish(self) -> Iterable[JudgeRow]: ...


def finding(what: FindingKind, text: str, *, seen: int | None = None, **fields: Any) -> JudgeRow:
    row: Row = dict.fromkeys(("offset", "end", "subject", "sequence", "id"))
    return JudgeRow(FINDING, row | fields | {"what": what.value, "text": text, "seen": seen})
