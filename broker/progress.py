"""Core. How far consumer groups are, and where a group stands after an operator moved it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from qmq import ranges
from qmq.broker.consume import Subscription
from qmq.dead_letters import REDRIVER, letters_producer
from qmq.errors import OperatorError
from qmq.log import MessageLog
from qmq.log.group import Consumer, Group
from qmq.subjects import dead_letter_subject, real_subject, retry_subject


class To(StrEnum):
    """Where a group may be moved to."""

    EARLIEST = "earliest"
    LATEST = "latest"
    SEQUENCE = "sequence"
    TIME = "time"


class Reset(NamedTuple):
    """What moving a group changes."""

    before: int
    after: int
    skipped: int
    """Messages that it has not acked and will not get."""
    repeated: int
    """Messages that it has acked and will get again."""


@dataclass(frozen=True, slots=True)
class ConsumerProgress:
    consumer: str
    unacked: int
    peer: str
    """Other end of its connection; empty while it has none."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    subject: str
    group: str
    first_sequence: int
    """The oldest message of the subject that is still in the log."""
    next_sequence: int
    position: int
    returned: int
    lag: int
    """Messages that are not acked."""
    oldest_offset: int | None
    """The frame of the oldest of them that is still in the log."""
    consumers: list[ConsumerProgress]
    dead_letters: int
    """Messages in the group's own dead-letter subject that were not given back; and the group's newest ones in a
    subject that an operator chose, as many as are remembered of a producer, given back or not. 0 of a derived one."""


def of_groups(
    log: MessageLog,
    subscriptions: Iterable[Subscription],
    *,
    subject: str = "",
    group: str = "",
    lacking: Mapping[tuple[str, str], int] = MappingProxyType({}),
) -> Iterator[GroupProgress]:
    """Say how far each group is; an empty name stands for all. Those that are `lacking` begin at a sequence when they
    subscribe here.

    Raises:
        CorruptFrame: this copy is damaged.
    """
    peers: dict[tuple[str, str], dict[str, str]] = {}
    for one in subscriptions:
        peers.setdefault((one.subject, one.group), {})[one.consumer] = one.link.peer
    for key in [key for key in log.state.groups if subject in ("", key[0]) and group in ("", key[1])]:
        if (known := log.state.groups.get(key)) is not None:
            yield _of_group(log, key, known, peers.get(key, {}))
    for key, position in lacking.items():
        if subject in ("", key[0]) and group in ("", key[1]) and key not in log.state.groups:
            yield _of_group(log, key, Group(position), {})


def _of_group(log: MessageLog, key: tuple[str, str], group: Group, peers: dict[str, str]) -> GroupProgress:
    subject, name = key
    first, end = sequences_kept(log, subject)
    unacked, first_unacked = group.unconsumed(end), group.first_unconsumed(end)
    oldest = end if first_unacked is None else first_unacked
    refs = log.frames(subject, oldest, 1) if oldest < end else []
    consumers = [
        ConsumerProgress(consumer, group.consumers.get(consumer, Consumer()).unacked_messages, peers.get(consumer, ""))
        for consumer in sorted(group.consumers.keys() | peers.keys())
    ]
    return GroupProgress(
        subject,
        name,
        first,
        end,
        group.position,
        group.requeued.messages,
        ranges.size(unacked),
        refs[0].offset if refs else None,
        consumers,
        _dead_letters(log, subject, name),
    )


def _dead_letters(log: MessageLog, subject: str, group: str) -> int:
    if subject != real_subject(subject):
        return 0
    own = dead_letter_subject(subject, group)
    first, end = sequences_kept(log, own)
    redriver = log.state.groups.get((own, REDRIVER))
    left = [(first, end)] if redriver is None else redriver.unconsumed(end)
    return ranges.size(ranges.difference(left, [(0, first)])) + _dead_letters_elsewhere(log, subject, group)


def _dead_letters_elsewhere(log: MessageLog, subject: str, group: str) -> int:
    """Others write to a chosen subject, too: whose its messages are stands in their frames, and in what the fold keeps
    of their producers."""
    count, own = 0, dead_letter_subject(subject, group)
    for source in (subject, retry_subject(subject, group)):
        for stored in log.state.producers.get(letters_producer(source, group), {}).values():
            if stored.end > log.state.kept.start:
                refs = log.frames(own, stored.first_sequence, 1)
                count += not refs or refs[0].offset + refs[0].length != stored.end
    return count


def sequences_kept(log: MessageLog, subject: str) -> tuple[int, int]:
    """Return which messages of `subject` are in the log: `[first, end)`."""
    end = log.state.next_sequence.get(subject, 0)
    refs = log.frames(subject, 0, 1)
    return refs[0].begin if refs else end, end


def plan_reset(log: MessageLog, subject: str, group: str, known: Group | None, to: str, value: int) -> Reset:
    """Say what moving `group`, which stands as `known`, on `subject` changes.

    What retention took is not to be had: the oldest message is next.

    Raises:
        OperatorError: that cannot be done; says why.
        CorruptFrame: this copy is damaged where it had to be read.
    """
    if known is None:
        raise OperatorError(f"consumer group {group!r} never subscribed to {subject!r} here: there is nothing to move")
    first, end = sequences_kept(log, subject)
    match to:
        case To.EARLIEST:
            after = first
        case To.LATEST:
            after = end
        case To.SEQUENCE if value > end:
            raise OperatorError(f"sequence {value} of {subject!r} is beyond its end, {end}")
        case To.SEQUENCE:
            after = max(value, first)
        case To.TIME:
            after = first_since(log, subject, value)
        case _:
            raise OperatorError(f"a group moves to {', '.join(To)}; not to {to!r}")
    return _counted(known, after, first, end)


def _counted(group: Group, after: int, first: int, end: int) -> Reset:
    unacked = group.unconsumed(end)
    kept = ranges.size(ranges.difference(unacked, [(0, first)]))
    again = ranges.size(ranges.difference(unacked, [(0, after)]))
    skipped = kept - again
    return Reset(group.position, after, skipped, end - after - again)


def first_since(log: MessageLog, subject: str, since_ms: int) -> int:
    """Return the first message of `subject` that was stored at `since_ms` or later, by the clock of its master.

    Where clocks went back, there are several such borders between earlier and later messages, and this is one of them.

    Raises:
        CorruptFrame: this copy is damaged there.
    """
    low, high = sequences_kept(log, subject)
    while low < high:
        refs = log.frames(subject, (low + high) // 2, 1)
        if not refs:
            break
        if log.timestamp_at(refs[0].offset) < since_ms:
            low = refs[0].end
        else:
            high = min(refs[0].begin, high)
    return low
