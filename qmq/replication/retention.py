"""Core. Agreed deletion: the master decides in a retention frame (qmq.log.retention), and the copies follow.

It decides only while enough slaves are in sync and the clocks of the copies and of the metaserver agree. So one wrong
clock deletes nothing. A past wrong clock deletes nothing either: a segment's age counts from the agreed time of the
retention frame behind it, not from the times in its frames. So each closed segment gets a retention frame, if only to
state the time. A log without such frames begins to age with the first one.

Keeps I26.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

from qmq.log import MessageLog
from qmq.log.retention import Key, RetentionDecision
from qmq.replication.settings import CopySettings

HOUR_MS = 3_600_000
AGE, SIZE = "age", "size"


class Due(NamedTuple):
    """Due deletion of everything before `start`: its rule, and the messages that groups lose unconsumed."""

    start: int
    rule: str
    unconsumed: dict[Key, int]


class Keeper(Protocol):
    """Retention rules of a process for its log's contents. Made by its main."""

    def due(self, message_log: MessageLog, now_ms: int) -> Due | None:
        """Return the due deletion, as master, at the agreed time; raises CorruptFrame if this copy is damaged."""

    def used_from(self, message_log: MessageLog) -> int:
        """Return the offset from which this process still reads its own copy."""


def old_segments(message_log: MessageLog, settings: CopySettings, now_ms: int) -> Iterator[tuple[int, int, str]]:
    """Yield (begin, end, rule) of the closed segments over the age or size limit, oldest first."""
    kept = message_log.state.kept
    for begin, end in pairwise(base for base in message_log.bases if base >= kept.start):
        rule = _rule(message_log, begin, end, settings, now_ms)
        if not rule:
            return
        yield begin, end, rule


def _rule(message_log: MessageLog, begin: int, end: int, settings: CopySettings, now_ms: int) -> str:
    if message_log.end - begin > settings.retention_bytes:
        return SIZE
    written_ms = message_log.state.kept.written_before_ms(end)
    return AGE if written_ms is not None and now_ms - written_ms > settings.retention_hours * HOUR_MS else ""


def decide(
    message_log: MessageLog, keeper: Keeper, *, now_ms: int, ahead_ms: dict[str, int], high_watermark: int
) -> RetentionDecision | None:
    """Return the decision that a master should append now, or None if nothing is due. Slaves are in sync, clocks agree.

    Args:
        high_watermark: the master's own, which is newer than that in the log's frames.

    Raises:
        CorruptFrame: this copy is damaged.
    """
    kept = message_log.state.kept
    states_the_time = RetentionDecision(kept.start, "", ahead_ms, {})
    if kept.decided_end > message_log.state.high_watermark:
        # Copies wait for a frame that shows the last decision as acknowledged. This frame does, if no other comes.
        return states_the_time if kept.decided_end <= high_watermark else None
    if (due := keeper.due(message_log, now_ms)) is not None:
        return RetentionDecision(due.start, due.rule, ahead_ms, due.unconsumed)
    bases = message_log.bases
    return states_the_time if len(bases) > 1 and kept.written_before_ms(bases[-1]) is None else None
