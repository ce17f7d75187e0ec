"""Core. Where consumer groups begin, how far they are, and where an operator moves them.

A group begins once in the cluster (decision 80). The metaserver stores its begin at the first SUBSCRIBE anywhere;
before that, the masters of the subject's route note where the subject ends. A SUBSCRIBE waits here for the
metaserver's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from qmq import ranges
from qmq.broker.subscriptions import Subscription
from qmq.dead_letters import REDRIVER, letters_producer
from qmq.errors import OperatorError, Overloaded, QmqError
from qmq.log import MessageLog
from qmq.log.group import Consumer, Group
from qmq.remoting.packet import Packet
from qmq.replication.ports import Link
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


Key = tuple[str, str]
"""Subject, consumer group."""
NOTED_MAX = 10_000
"""Ends that were noted and are kept. A group whose end was dropped begins by time, some messages earlier."""
WAITING_MAX = 1_000
NOW = "now"
"""A mark that names the end of the subject as it is."""


class NewGroup(NamedTuple):
    """What a SUBSCRIBE asks for of a group that has no position here."""

    subject: str
    group: str
    latest: bool
    since_ms: int
    broadcast: bool


class Begin(NamedTuple):
    """Where a group begins: with the first message stored at `since_ms` or later (0: with the first that is kept), or,
    if the end of the subject was noted under `mark`, there. `began_ms`: when it began in the cluster; 0: not known."""

    since_ms: int
    mark: str = ""
    began_ms: int = 0

    @staticmethod
    def as_asked(start: str, since_ms: int) -> Begin:
        return Begin(since_ms if start == "since" else 0, NOW if start == "latest" else "")


Waiting = list[tuple[Link, Packet]]
Answered = Callable[[Begin | QmqError | None], Waiting]
"""Takes the answer; returns the packets to be handled now, as if they had just come."""
Ask = Callable[[NewGroup, Answered], None]
"""Asks the metaserver; the answer comes later, once. None: it is of a version that stores no consumer groups."""


class Beginning:
    """Made with a mastership, ends with it. `ask` is None if this broker group is all of the cluster."""

    def __init__(self, message_log: MessageLog, ask: Ask | None) -> None:
        self._log, self._ask = message_log, ask
        self._waiting: dict[Key, Waiting] = {}
        self._answers: dict[Key, Begin] = {}
        """Of groups that begin with the next SUBSCRIBE."""
        self._asked_for: set[Key] = set()
        """Groups that are counted in their token's ration, and have not begun."""
        self._noted: dict[tuple[str, Key], int] = {}

    def _must_ask(self, f: dict[str, Any]) -> bool:
        """Return whether the cluster decides where this SUBSCRIBE begins. It does not for consumers that never come
        back, nor for a retry or dead-letter subject from its beginning: that is the same everywhere, at any time."""
        is_derived = real_subject(f["subject"]) != f["subject"]
        return not f["ephemeral"] and not (is_derived and f["start"] == "earliest")

    def is_first(self, key: Key) -> bool:
        """Return whether no SUBSCRIBE of this group came before; it counts as come from now on."""
        is_first = key not in self._asked_for
        if self._ask is not None:
            self._asked_for.add(key)
        return is_first

    def answer_for(self, f: dict[str, Any], link: Link, packet: Packet) -> Begin | None:
        """Return where the group of a SUBSCRIBE begins; None: the packet waits until the metaserver has answered.

        Groups that wait already are not asked for again.
        """
        key = f["subject"], f["group"]
        as_asked = Begin.as_asked(f["start"], f["since_ms"])
        if self._ask is None or not self._must_ask(f):
            return as_asked
        if (answer := self._answers.get(key)) is not None:
            return answer
        is_asked = key in self._waiting
        if (len(self._waiting[key]) if is_asked else len(self._waiting)) >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX:,} new consumer groups, or consumers of one, wait for the metaserver")
        self._waiting.setdefault(key, []).append((link, packet))
        if not is_asked:
            since_ms = f["since_ms"] if f["start"] == "since" else 0
            new = NewGroup(*key, f["start"] == "latest", since_ms, f["broadcast"])
            self._ask(new, lambda answer: self._answered(key, as_asked if answer is None else answer))
        return None

    def _answered(self, key: Key, answer: Begin | QmqError) -> Waiting:
        waiting = [(link, packet) for link, packet in self._waiting.pop(key, ()) if link.is_open]
        if isinstance(answer, QmqError):
            for link, packet in waiting:
                link.refuse(packet, answer)
            return []
        if waiting:  # else the mastership is over, or its consumers left
            self._answers[key] = answer
        return waiting

    def begun(self, key: Key) -> None:
        """The group has a position."""
        self._asked_for.discard(key)
        self._answers.pop(key, None)

    def note(self, mark: str, keys: Iterable[Key]) -> list[bool]:
        """Note where subjects end now; return which groups have a position already."""
        state, known = self._log.state, list[bool]()
        for key in keys:
            known.append(key in state.groups)
            self._noted[mark, key] = state.next_sequence.get(key[0], 0)
        while len(self._noted) > NOTED_MAX:
            del self._noted[next(iter(self._noted))]
        return known

    def noted(self, begin: Begin, key: Key) -> int | None:
        """Return what was noted of a group under the mark of `begin`; None: nothing, or no more."""
        if begin.mark == NOW:
            return self._log.state.next_sequence.get(key[0], 0)
        return self._noted.get((begin.mark, key))

    def step_down(self, error: QmqError) -> None:
        """The mastership is over: who waits asks the next master."""
        for waiting in self._waiting.values():
            for link, packet in waiting:
                link.refuse(packet, error)
        self._waiting.clear()
