"""Core. Findings: their kinds, their columns, and the rows in which judges report them.

    findings   what string, copy string, offset long, end long, subject string, sequence long, id string, text string

`what` is a `FindingKind`; `copy` is "master", "slave", or "both" if both copies are wrong alike. `audit.inspection`
adds group, host, segment and epoch to reported findings.

Judges also report facts about pieces and subjects to the driver. All rows can be JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from qmq.ledger import ALIKE


class FindingKind(StrEnum):
    """Kind of a finding. The values appear in reports, results, tables and metrics."""

    # One copy: bytes and their order.
    DAMAGED = "damaged"
    """Bytes that are no frame, or a frame whose body does not match its CRC."""
    REPAIRED = "repaired"
    """Bytes that were damaged when read; the broker has since restored them from the other copy."""
    CHAIN = "chain"
    """A frame that does not continue the chain before it."""
    SEQUENCE = "sequence"
    """A gap, a repeat, or a wrong order in a subject."""
    EPOCH = "epoch"
    """An older epoch after a newer one."""
    EPOCH_FRAME = "epoch_frame"
    """An epoch that does not begin with its epoch frame."""
    WATERMARK = "watermark"
    """A high watermark behind its own frame, or lower than an earlier one."""
    TIME = "time"
    """A time in the future, or one that goes back within an epoch."""
    UNREAD = "unread"
    """Bytes below the high watermark that a copy did not return, without reporting damage."""
    REWOUND = "rewound"
    """A log or subject that ends before the end verified by an earlier run."""
    REWRITTEN = "rewritten"
    """A log other than the one verified by an earlier run."""
    RETENTION = "retention"
    """Frames gone without a retention frame, or a retention frame that contradicts an earlier one."""
    INDEX = "index"
    """An index that does not follow from its segment."""
    SNAPSHOT = "snapshot"
    """A snapshot that does not follow from the log before it."""

    # Messages.
    UNDECODABLE = "undecodable"
    """A message that consumers cannot decode."""
    FOREIGN = "foreign"
    """A message of another subject than its frame's."""
    LABELS = "labels"
    """A label that does not match its message's tags and order key."""
    BATCH_TWICE = "batch_twice"
    """A batch stored twice under one producer id and batch number."""
    ID_TWICE = "id_twice"
    """A message id that one producer stored twice in a subject."""
    LOST = "lost"
    """A message acknowledged to its producer and absent."""
    ALTERED = "altered"
    """A message acknowledged to its producer and stored with another content."""

    # Consumption.
    PROGRESS = "progress"
    """A pull, ack or position that does not follow from the log."""
    UNRECORDED = "unrecorded"
    """A consumer group moved or removed without a command in the audit trail."""
    POSITION = "position"
    """A position of a consumer group after the subject's end."""
    UNACKED = "unacked"
    """Messages delivered long ago, and neither acked nor requeued."""
    CONSERVATION = "conservation"
    """A message in no state of a consumer group, or in two."""
    DEAD_ALTERED = "dead_altered"
    """A dead letter with another content or another number of deliveries than its original."""
    DEAD_UNFOUNDED = "dead_unfounded"
    """A dead letter of a message that does not exist, or that its consumer group did not hold."""
    DEAD_TWICE = "dead_twice"
    """A second dead letter of one message and consumer group."""
    DEAD_MISSING = "dead_missing"
    """A message acked as dead, without a dead letter."""
    PASSED = "passed"
    """Messages passed over although the consumer's filter selects them."""

    # Delay servers.
    EARLY = "early"
    """A delayed message planned before it was due."""
    TWICE = "twice"
    """A delayed message stored by broker groups in two batches, or planned again after it was stored."""
    UNPLANNED = "unplanned"
    """A batch of a delay server without its plan."""
    UNSENT = "unsent"
    """A delayed message due long ago, neither sent nor cancelled."""
    RECALLED = "recalled"
    """A delayed message planned after it was cancelled or written again."""

    # Between the copies.
    MISSING = "missing"
    """Frames that only the master has."""
    EXTRA = "extra"
    """Frames that only the slave has."""
    DIFFERENT = "different"
    """Another frame at the same offset."""
    REORDERED = "reordered"
    """The same messages at another offset."""
    SHIFTED = "shifted"
    """The same frames, all moved by one distance."""
    HISTORY = "history"
    """Equal frames with different chains: the difference lies before the compared range."""


DERIVED = frozenset({FindingKind.INDEX, FindingKind.SNAPSHOT})
"""Kinds about files beside the log, at the offset of their segment; they concern no frame."""

UNVERIFIED = frozenset(
    {FindingKind.REWOUND, FindingKind.REWRITTEN, FindingKind.UNREAD, FindingKind.LOST, FindingKind.ALTERED}
)
"""Kinds that leave their range unverified even where both copies are wrong alike."""

UNACKED_MS = 86_400_000
"""Age at which unacked messages are a finding. Handlers may take long; the broker's own alert begins after an hour."""
FINDINGS_MAX = 1000
"""Findings of one kind that are listed; all are counted."""


FINDINGS = ("what", "copy", "offset", "end", "subject", "sequence", "id", "text")

MASTER, SLAVE = "master", "slave"
COPIES = (MASTER, SLAVE)
BOTH = ALIKE
COPIES_MIN = 2
"""Default number of copies that must acknowledge (`min_copies`); further copies may be behind."""


FINDING = "finding"
"""A row of FINDINGS without its copy, and for the driver

seen    offset of the frame that revealed it; after damage in that copy, the damage may be its cause
due     of a gap: end of the subject's last frame before it; damage in between explains the gap
gap     of a gap: [first missing sequence, first one after them]
about   [subject, first sequence, end]: a gap in these messages is the cause, and this a consequence
since   time in ms from which on it holds; no finding within `UNACKED_MS` of the log's end
"""
MORE = "more"
"""{kind: number of findings counted but not listed}"""
PIECE = "piece"
"""begin, bytes, frames, messages, digest, apart: whether the copies differ; with frames also end, chain, size:
offset of the last frame, and time_ms of that frame
"""
SUBJECT = "subject"
"""subject, first: first sequence, end: sequence after the last, due_end: the same below the high watermark"""
HOUR = "hour"
"""subject, hour since 1970 UTC, messages, bytes"""
ACCOUNT = "account"
"""subject, consumer_group, stored, each state of `audit.conservation`, nacked: totals over all hours"""
MOVED = "moved"
"""subject, consumer_group, offset and end of the frame, at_ms, text: a group that existed was moved or removed"""
EPOCHS = "epochs"
"""{epoch: offset of its first frame}"""
KEPT = "kept"
"""from: first offset kept, by the retention frames"""
UNREAD = "unread"
"""text: the reason why a piece was not read"""

HOURS_MAX, ACCOUNTS_MAX = 20_000, 5_000
"""Counts per subject and hour, and equations of consumer groups, that the driver takes of one broker group. With
100,000 subjects, a week has 17 million counts per copy.
"""
FULL_GROUPS = 10
"""Broker groups of a run with these full limits. The groups of a larger run share the rows of so many groups, because
the driver keeps all results.
"""


class Share(NamedTuple):
    """Rows that the driver takes of one broker group. `takes_ends`: also a row per subject, for ledger and journal."""

    hours: int = HOURS_MAX
    accounts: int = ACCOUNTS_MAX
    takes_ends: bool = True


FULL_SHARE = Share()


def share_of(groups: int, *, takes_ends: bool) -> Share:
    """Return each group's share of the driver's rows in a run of `groups` broker groups."""
    parts = max(1.0, groups / FULL_GROUPS)
    return Share(math.ceil(HOURS_MAX / parts), math.ceil(ACCOUNTS_MAX / parts), takes_ends)


Row = dict[str, Any]
HOUR_MS = 3_600_000


class JudgeRow(NamedTuple):
    """One row from a judge; its kind is one of the above, or `audit.consumption.CONSERVED`."""

    kind: str
    row: Row


class Judge(Protocol):
    """Judge of one copy, fed with the facts of piece after piece."""

    def take(self, piece: int, facts: Any, /) -> Iterable[JudgeRow]: ...

    def finish(self) -> Iterable[JudgeRow]: ...


def finding_row(what: FindingKind, **fields: Any) -> Row:
    """Return a row of FINDINGS; fields that are not given are null."""
    return dict.fromkeys(FINDINGS) | {"what": what.value} | fields


def finding(what: FindingKind, text: str, *, seen: int | None = None, **fields: Any) -> JudgeRow:
    row: Row = dict.fromkeys(("offset", "end", "subject", "sequence", "id"))
    return JudgeRow(FINDING, row | fields | {"what": what.value, "text": text, "seen": seen})
