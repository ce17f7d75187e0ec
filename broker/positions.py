"""Core. Positions of consumer groups: their begin, their progress, and moves by an operator.

A group begins once in the cluster (decision 80). The metaserver stores its begin at the first SUBSCRIBE anywhere;
before that, the masters of the subject's route note where the subject ends. A SUBSCRIBE waits here for the
metaserver's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappush, heapreplace
from types import MappingProxyType
from typing import Any, NamedTuple

from qmq import ranges
from qmq.broker.group_status import Backlog, Key
from qmq.broker.subscriptions import Subscription
from qmq.dead_letters import REDRIVER, letters_producer
from qmq.errors import OperatorError, Overloaded, QmqError
from qmq.log import MessageLog
from qmq.log.group import MASTERSHIP_BITS, Consumer, Group
from qmq.log.index import FrameRef
from qmq.remoting.packet import Packet
from qmq.replication.ports import Link
from qmq.subjects import (
    DEAD_LETTER,
    dead_letter_subject,
    is_dead_letter_subject,
    parse_derived,
    real_subject,
    retry_subject,
)


class To(StrEnum):
    """Targets of a move."""

    EARLIEST = "earliest"
    LATEST = "latest"
    SEQUENCE = "sequence"
    TIME = "time"
    REMOVED = "removed"
    """The group is forgotten, for RemoveConsumerGroup: it keeps no messages any more."""


class Reset(NamedTuple):
    """Effect of moving a group."""

    before: int
    after: int
    skipped: int
    """Messages not acked that the group will not get."""
    repeated: int
    """Acked messages that the group will get again."""


@dataclass(frozen=True, slots=True)
class ConsumerProgress:
    """Progress of one consumer of a group."""

    consumer: str
    unacked: int
    peer: str
    """Address of its connection; empty without one."""
    delivered: int
    """Messages delivered in the newest mastership: a new one begins at zero."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """Progress of one consumer group on one subject."""

    subject: str
    group: str
    first_sequence: int
    """The oldest message of the subject in the log."""
    next_sequence: int
    position: int
    returned: int
    lag: int
    """Messages not acked."""
    oldest_offset: int | None
    """Frame of the oldest message not acked that is in the log."""
    consumers: list[ConsumerProgress]
    dead_letters: int
    """Messages in the group's own dead-letter subject that were not redriven. In a subject chosen by an operator, the
    group's newest ones count, redriven or not: as many as the fold remembers of a producer. 0 for derived subjects.
    """


Connected = Callable[[str, str], Iterable[Subscription]]
"""Returns the subscriptions of a (subject, consumer group)."""


def keys_of(
    log: MessageLog, *, subject: str = "", group: str = "", lacking: Mapping[Key, int] = MappingProxyType({})
) -> list[Key]:
    """Return the groups with these names; an empty name matches all. Groups of `lacking` have no position here yet."""
    every = [*log.state.groups, *(key for key in lacking if key not in log.state.groups)]
    return [key for key in every if subject in ("", key[0]) and group in ("", key[1])]


def of_groups(
    log: MessageLog, connected_to: Connected, keys: Iterable[Key], lacking: Mapping[Key, int] = MappingProxyType({})
) -> Iterator[GroupProgress]:
    """Yield the progress of groups; `lacking` has the begin of groups without progress in this log.

    Raises:
        CorruptFrame: this copy is damaged.
    """
    for key in keys:
        if (known := _known(log, key, lacking)) is not None:
            peers = {subscription.consumer: subscription.link.peer for subscription in connected_to(*key)}
            yield _of_group(log, key, known, peers)


def _known(log: MessageLog, key: Key, lacking: Mapping[Key, int]) -> Group | None:
    return log.state.groups.get(key) or (Group(lacking[key]) if key in lacking else None)


class Sums(NamedTuple):
    """Sums over groups."""

    groups: int = 0
    lag: int = 0
    unacked: int = 0
    dead_letters: int = 0


class Behind:
    """Search for the groups with the largest lag and with the most dead letters.

    Only groups with dead letters are looked up in indexes: that takes 30 µs, and 80 µs in a log of 30 segments, which
    would be 8 s for 100,000 groups. The progress of redrives is left out: its lag is the dead letters of another group.

    Args:
        most: how many groups of each kind.
        chosen: groups with a chosen subject for dead letters.
    """

    def __init__(self, log: MessageLog, most: int, lacking: Mapping[Key, int], chosen: Iterable[Key]) -> None:
        self._log = log
        self._most = most
        self._lacking = lacking
        names = (parse_derived(name) for name in log.state.next_sequence if name.startswith(DEAD_LETTER))
        self._with_letters = {(name.real, name.group) for name in names if name is not None} | set(chosen)
        self._behind: list[tuple[int, int, Key]] = []
        """Heap of (lag, dead letters, key)."""
        self._dead: list[tuple[int, int, Key]] = []
        """Heap of (dead letters, lag, key)."""
        self.sums = Sums()

    def look(self, keys: Iterable[Key]) -> None:
        """Count these groups. Raises CorruptFrame: this copy is damaged."""
        state, sums = self._log.state, self.sums
        groups = lags = unacked = letters = 0
        for key in keys:
            known = _known(self._log, key, self._lacking)
            if known is None or (key[1] == REDRIVER and is_dead_letter_subject(key[0])):
                continue
            waiting, delivered = Backlog.of(known, state.next_sequence.get(key[0], 0))
            lag, dead = waiting + delivered, _dead_letters(self._log, *key) if key in self._with_letters else 0
            groups, lags, unacked, letters = groups + 1, lags + lag, unacked + delivered, letters + dead
            if lag:
                self._keep(self._behind, (lag, dead, key))
            if dead:
                self._keep(self._dead, (dead, lag, key))
        self.sums = Sums(sums.groups + groups, sums.lag + lags, sums.unacked + unacked, sums.dead_letters + letters)

    def _keep(self, heap: list[tuple[int, int, Key]], entry: tuple[int, int, Key]) -> None:
        if len(heap) < self._most:
            heappush(heap, entry)
        elif entry > heap[0]:
            heapreplace(heap, entry)

    def keys(self) -> list[Key]:
        """Return the found groups: the largest lag first, then the most dead letters first."""
        found = sorted(self._behind, reverse=True) + sorted(self._dead, reverse=True)
        return list(dict.fromkeys(key for _, _, key in found))


def _of_group(log: MessageLog, key: Key, group: Group, peers: dict[str, str]) -> GroupProgress:
    subject, name = key
    first, end = sequences_kept(log, subject)
    unacked, first_unacked = group.unconsumed(end), group.first_unconsumed(end)
    oldest = end if first_unacked is None else first_unacked
    refs = log.frames(subject, oldest, 1) if oldest < end else []
    consumers = [
        _of_consumer(consumer, group.consumers.get(consumer, Consumer()), peers.get(consumer, ""))
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


def _of_consumer(name: str, consumer: Consumer, peer: str) -> ConsumerProgress:
    return ConsumerProgress(name, consumer.unacked_messages, peer, consumer.next_pull & (1 << MASTERSHIP_BITS) - 1)


def _dead_letters(log: MessageLog, subject: str, group: str) -> int:
    if subject != real_subject(subject):
        return 0
    own = dead_letter_subject(subject, group)
    first, end = sequences_kept(log, own)
    redriver = log.state.groups.get((own, REDRIVER))
    left = [(first, end)] if redriver is None else redriver.unconsumed(end)
    return ranges.size(ranges.difference(left, [(0, first)])) + _dead_letters_elsewhere(log, subject, group)


def _dead_letters_elsewhere(log: MessageLog, subject: str, group: str) -> int:
    """Count the group's dead letters in a chosen subject. It has other producers too, so the fold's record of the
    group's own producer identifies them.
    """
    count, own = 0, dead_letter_subject(subject, group)
    for source in (subject, retry_subject(subject, group)):
        for stored in log.state.producers.get(letters_producer(source, group), {}).values():
            if stored.end > log.state.kept.start:
                refs = log.frames(own, stored.first_sequence, 1)
                count += not refs or refs[0].offset + refs[0].length != stored.end
    return count


def sequences_kept(log: MessageLog, subject: str) -> tuple[int, int]:
    """Return the range `[first, end)` of messages of `subject` in the log."""
    end = log.state.next_sequence.get(subject, 0)
    refs = log.frames(subject, 0, 1)
    return refs[0].begin if refs else end, end


def plan_reset(log: MessageLog, subject: str, group: str, known: Group | None, to: str, value: int) -> Reset:
    """Return the effect of moving `group`, in the state `known`, on `subject`.

    Messages that retention deleted cannot be delivered: the group goes to the oldest one instead.

    Raises:
        OperatorError: the move is not possible, for the reason in the text.
        CorruptFrame: this copy is damaged where it had to be read.
    """
    if known is None:
        raise OperatorError(f"consumer group {group!r} never subscribed to {subject!r} here: there is nothing to move")
    first, end = sequences_kept(log, subject)
    match to:
        case To.EARLIEST:
            after = first
        case To.LATEST | To.REMOVED:
            after = end
        case To.SEQUENCE if value > end:
            raise OperatorError(f"sequence {value} of {subject!r} is beyond its end, {end}")
        case To.SEQUENCE:
            after = max(value, first)
        case To.TIME:
            after = first_since(log, subject, value)
        case _:
            raise OperatorError(f"{to!r} is no target of a move. Use {', '.join(To)}.")
    return _counted(known, after, first, end)


def _counted(group: Group, after: int, first: int, end: int) -> Reset:
    unacked = group.unconsumed(end)
    kept = ranges.size(ranges.difference(unacked, [(0, first)]))
    again = ranges.size(ranges.difference(unacked, [(0, after)]))
    skipped = kept - again
    return Reset(group.position, after, skipped, end - after - again)


def first_since(log: MessageLog, subject: str, since_ms: int) -> int:
    """Return the first message of `subject` stored at `since_ms` or later, by its master's clock.

    If clocks went back there are several borders between earlier and later messages; this is one of them.

    Raises:
        CorruptFrame: this copy is damaged there.
    """
    return border(log, subject, lambda ref: log.timestamp_at(ref.offset) < since_ms)


def border(log: MessageLog, subject: str, is_older: Callable[[FrameRef], bool]) -> int:
    """Return the first sequence that is not older, by a binary search."""
    search = borders(log, subject)
    try:
        ref = next(search)
        while True:
            ref = search.send(is_older(ref))
    except StopIteration as found:
        return int(found.value)


def borders(log: MessageLog, subject: str) -> Generator[FrameRef, bool, int]:
    """Search for the border between older and newer messages.

    Yields frames; the caller sends back whether each is older. Returns the first sequence that is not. Messages may
    come and go between the steps.
    """
    low, high = sequences_kept(log, subject)
    while low < high:
        refs = log.frames(subject, (low + high) // 2, 1)
        if not refs:
            break
        if (yield refs[0]):
            low = refs[0].end
        else:
            high = min(refs[0].begin, high)
    return low


NOTED_MAX = 10_000
"""Noted ends that are kept. After its noted end was dropped, a group begins by time, some messages earlier."""
WAITING_MAX = 1_000
"""Groups, and consumers of each, that wait for the metaserver; further ones are refused."""
NOW = "now"
"""Mark that names the current end of the subject."""


class NewGroup(NamedTuple):
    """Request of a SUBSCRIBE for a group without a position here."""

    subject: str
    group: str
    latest: bool
    since_ms: int
    broadcast: bool


class Begin(NamedTuple):
    """Begin of a group: the end noted under `mark`, or else the first message stored at `since_ms` or later (0: the
    first in the log). `began_ms`: when it began in the cluster; 0: unknown.
    """

    since_ms: int
    mark: str = ""
    began_ms: int = 0

    @staticmethod
    def as_asked(start: str, since_ms: int) -> Begin:
        return Begin(since_ms if start == "since" else 0, NOW if start == "latest" else "")


Waiting = list[tuple[Link, Packet]]
Answered = Callable[[Begin | QmqError | None], Waiting]
"""Takes the answer; returns the packets to handle again now."""
Ask = Callable[[NewGroup, Answered], None]
"""Sends the request to the metaserver; the answer comes later, once. None: its version stores no consumer groups."""


class GroupBegins:
    """Begins of new groups. Made with a mastership, ends with it. `ask` is None if this broker group is the whole
    cluster.
    """

    def __init__(self, message_log: MessageLog, ask: Ask | None) -> None:
        self._log = message_log
        self._ask = ask
        self._waiting: dict[Key, Waiting] = {}
        self._answers: dict[Key, Begin] = {}
        """Begins of groups that wait for their next SUBSCRIBE."""
        self._asked_for: set[Key] = set()
        """Groups counted in their token's ration that have not begun."""
        self._noted: dict[tuple[str, Key], int] = {}

    def _must_ask(self, f: dict[str, Any]) -> bool:
        """Return whether the cluster decides where this SUBSCRIBE begins. It does not for ephemeral consumers, nor for
        a retry or dead-letter subject from its beginning, which is the same everywhere.
        """
        is_derived = real_subject(f["subject"]) != f["subject"]
        return not f["ephemeral"] and not (is_derived and f["start"] == "earliest")

    def is_first(self, key: Key) -> bool:
        """Return whether this is the group's first SUBSCRIBE, and remember it."""
        is_first = key not in self._asked_for
        if self._ask is not None:
            self._asked_for.add(key)
        return is_first

    def answer_for(self, f: dict[str, Any], link: Link, packet: Packet) -> Begin | None:
        """Return the begin for a SUBSCRIBE; None: the packet waits for the metaserver's answer.

        Each group is requested once, however many of its consumers wait.
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
        if waiting:  # else the mastership ended, or its consumers left
            self._answers[key] = answer
        return waiting

    def begun(self, key: Key) -> None:
        """Forget the begin of a group that has a position now."""
        self._asked_for.discard(key)
        self._answers.pop(key, None)

    def note(self, mark: str, keys: Iterable[Key]) -> list[bool]:
        """Note where subjects end now; return which groups have a position."""
        state, known = self._log.state, list[bool]()
        for key in keys:
            known.append(key in state.groups)
            self._noted[mark, key] = state.next_sequence.get(key[0], 0)
        while len(self._noted) > NOTED_MAX:
            del self._noted[next(iter(self._noted))]
        return known

    def noted(self, begin: Begin, key: Key) -> int | None:
        """Return the end noted for a group under the mark of `begin`, or None."""
        if begin.mark == NOW:
            return self._log.state.next_sequence.get(key[0], 0)
        return self._noted.get((begin.mark, key))

    def step_down(self, error: QmqError) -> None:
        """End the mastership: refuse the waiting packets, which go to the next master."""
        for waiting in self._waiting.values():
            for link, packet in waiting:
                link.refuse(packet, error)
        self._waiting.clear()
