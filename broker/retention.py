"""Core. Which old segments may go: by age and by size, and never what somebody still needs."""

from __future__ import annotations

import logging
from typing import NamedTuple

from broker.settings import BrokerSettings
from qmq.log import MessageLog

log = logging.getLogger(__name__)

HOUR_MS = 3_600_000


class Limits(NamedTuple):
    age_ms: int
    unconsumed_age_ms: int
    bytes: int


def needed_from(log: MessageLog) -> int:
    """Return the offset of the oldest message that some group has not acked; the log's end if there is none."""
    needed = log.end  # who has all is passed over: 10,000 look-ups in 30 segments hold up everybody else for 1.5 s
    for (subject, _), group in log.state.groups.items():
        sequences = [group.position, *(entry[0] for entry in group.returned[:1])]
        # Not the first entries alone: messages that came back are older than what was handed out before them.
        sequences += [entry[1] for consumer in group.consumers.values() for entry in consumer.unacked]
        if (first := min(sequences)) < log.state.next_sequence.get(subject, 0):
            for ref in log.frames(subject, first, 1):
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


def is_due(log: MessageLog, *, oldest_ms: int, now_ms: int, limits: Limits) -> bool:
    """Return whether the oldest segment is too old, or the log too large, whoever needs what is in it."""
    return log.end - log.bases[0] > limits.bytes or now_ms - oldest_ms > limits.age_ms


def may_go(log: MessageLog, *, oldest_ms: int, now_ms: int, needed: int, limits: Limits) -> bool:
    """Return whether nobody's messages are in the oldest segment any more, or its limits are over.

    Args:
        oldest_ms: timestamp of the frame behind the segment, so everything in it is older.
        needed: `Consumed.needed_from(log)`. Age respects it up to `unconsumed_age_ms`; size does not: see `unconsumed`.
    """
    if log.end - log.bases[0] > limits.bytes:
        return True
    age_ms = now_ms - oldest_ms
    return age_ms > limits.age_ms and (log.bases[1] <= needed or age_ms > limits.unconsumed_age_ms)


def unconsumed(log: MessageLog) -> dict[tuple[str, str], int]:
    """Return, per (subject, group), how many messages it has not been handed although they are gone from the log."""
    lost = {}
    for (subject, name), group in log.state.groups.items():
        end = log.state.next_sequence.get(subject, 0)
        if group.position >= end:
            continue
        refs = log.frames(subject, group.position, 1)
        first = refs[0].begin if refs else end
        if first > group.position:
            lost[subject, name] = first - group.position
    return lost


class Retention:
    """What a broker keeps of its log. Made by main; asked by the service (`qmq.server.service.Keeper`)."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._limits = Limits(
            int(settings.retention_hours * HOUR_MS), int(settings.unconsumed_hours * HOUR_MS), settings.retention_bytes
        )
        self._consumed = Consumed()

    def may_drop(self, message_log: MessageLog, now_ms: int) -> bool:
        """Raises CorruptFrame: this copy is damaged."""
        oldest_ms = message_log.timestamp_at(message_log.bases[1])
        if not is_due(message_log, oldest_ms=oldest_ms, now_ms=now_ms, limits=self._limits):
            return False
        needed = self._consumed.needed_from(message_log)
        return may_go(message_log, oldest_ms=oldest_ms, now_ms=now_ms, needed=needed, limits=self._limits)

    def dropped(self, message_log: MessageLog) -> None:
        for (subject, group), messages in unconsumed(message_log).items():
            log.error("messages gone unconsumed subject=%s consumer_group=%s messages=%d", subject, group, messages)
