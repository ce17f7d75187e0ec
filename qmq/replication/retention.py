"""Core. Deleting is agreed: the master decides in a frame of the log what goes (qmq.log.retention), and copies follow.

It decides only while its slave is in sync and the clocks of both and of the metaserver agree. One wrong clock therefore
deletes nothing, whoever has it. Nor does it later: a segment's age is counted from the retention frame behind it, whose
time was agreed on, not from the times in its frames. So each closed segment gets one, which may do no more than state
the time. A log without them, from before there were any, begins to age with the first.

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
    """What may go now: everything before `start`, by which rule, and what is lost to whom by that."""

    start: int
    rule: str
    unconsumed: dict[Key, int]


class Keeper(Protocol):
    """What a process knows of its log's contents. Made by its main."""

    def due(self, message_log: MessageLog, now_ms: int) -> Due | None:
        """Return what may go, as master; `now_ms` was agreed on. Raises CorruptFrame: this copy is damaged."""

    def used_from(self, message_log: MessageLog) -> int:
        """Return the offset from which this process still reads its own copy."""


def old_segments(message_log: MessageLog, settings: CopySettings, now_ms: int) -> Iterator[tuple[int, int, str]]:
    """Yield (begin, end, rule) of the closed segments that are too old, or too much, oldest first."""
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
    """Return what the master of a group in sync should write down now; the clocks agree. None: nothing.

    Args:
        high_watermark: the master's own; what the log's frames say of it is older.

    Raises:
        CorruptFrame: this copy is damaged.
    """
    kept = message_log.state.kept
    states_the_time = RetentionDecision(kept.start, "", ahead_ms, {})
    if kept.decided_end > message_log.state.high_watermark:
        # No frame says yet that the last decision is acknowledged; copies wait for one. If none comes, ours says it.
        return states_the_time if kept.decided_end <= high_watermark else None
    if (due := keeper.due(message_log, now_ms)) is not None:
        return RetentionDecision(due.start, due.rule, ahead_ms, due.unconsumed)
    bases = message_log.bases
    return states_the_time if len(bases) > 1 and kept.written_before_ms(bases[-1]) is None else None
