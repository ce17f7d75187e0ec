"""Core. Which old segments may go: by age and by size, and never what somebody still needs."""

from __future__ import annotations

from typing import NamedTuple

from qmq.log import MessageLog

HOUR_MS = 3_600_000


class Limits(NamedTuple):
    age_ms: int
    unconsumed_age_ms: int
    bytes: int


def needed_from(log: MessageLog) -> int:
    """Return the offset of the oldest message that some group has not acked; the log's end if there is none."""
    needed = log.end
    for (subject, _), group in log.state.groups.items():
        sequences = [group.position, *(entry[0] for entry in group.returned[:1])]
        # Not the first entries alone: messages that came back are older than what was handed out before them.
        sequences += [entry[1] for consumer in group.consumers.values() for entry in consumer.unacked]
        for ref in log.frames(subject, min(sequences), 1):
            needed = min(needed, ref.offset)
    return needed


class Consumed:
    """What every group has acked, as both copies know it: an ack that only this copy has may still be undone.

    Made by main; asked every few seconds.
    """

    def __init__(self) -> None:
        self._needed = 0
        self._next = (0, 0, 0)
        """(needed, log end, chain) of an earlier look; valid once both copies hold all of it."""

    def needed_from(self, log: MessageLog) -> int:
        """Return an offset below which nobody needs anything any more.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        needed, end, chain = self._next
        if end <= log.state.high_watermark:
            if log.start <= end and log.chain_is(end, chain):
                self._needed = needed
            self._next = (needed_from(log), log.end, log.chain)
        elif end > log.end:  # that history was cut
            self._next = (needed_from(log), log.end, log.chain)
        return min(self._needed, needed_from(log))  # a group may have come since that begins earlier


def droppable(log: MessageLog, *, oldest_ms: int, now_ms: int, pinned: int, needed: int, limits: Limits) -> bool:
    """Return whether the oldest segment may go now.

    Args:
        oldest_ms: timestamp of the frame behind the segment, so everything in it is older.
        pinned: offset from which a slave or a reader (an audit) still needs the log.
        needed: `Consumed.needed_from(log)`. Age respects it up to `unconsumed_age_ms`; size does not: see `unconsumed`.
    """
    # Above the high watermark the other copy may have another history, or nothing: both need what is here to tell.
    if len(log.bases) < 2 or log.bases[1] > min(pinned, log.state.high_watermark):
        return False
    if log.bases[1] >= log.flushed_end:
        return False  # the next segment may not be on disk yet: its files are made by the commit that begins it
    if log.end - log.bases[0] > limits.bytes:
        return True
    age_ms = now_ms - oldest_ms
    return age_ms > limits.age_ms and (log.bases[1] <= needed or age_ms > limits.unconsumed_age_ms)


def unconsumed(log: MessageLog) -> dict[tuple[str, str], int]:
    """Return, per (subject, group), how many messages it has not been handed although they are gone from the log."""
    lost = {}
    for (subject, name), group in log.state.groups.items():
        refs = log.frames(subject, group.position, 1)
        first = refs[0].begin if refs else log.state.next_sequence.get(subject, 0)
        if first > group.position:
            lost[subject, name] = first - group.position
    return lost
