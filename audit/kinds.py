"""Core. The kinds of findings, and of what is wrong they are the names."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
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


DERIVED = frozenset({Kind.INDEX, Kind.SNAPSHOT})
"""These are about files beside the log, at the offset of their segment, and about no frame."""
