"""Core. Pending queues: due messages of each subject that are not planned yet, in memory or left on disk.

The home broker group of an order key is computed once for each message, and again when the groups that share the
subject's keys change. So scanning a long queue for messages that can go now is cheap.

When the queues exceed the limit of loaded messages, the longest are cut until half of the limit is left. So a subject
that can be sent keeps its queue beside one that cannot. The messages cut off still pend in the schedule. A queue that
runs low is refilled from there, a page at a time, many subjects in one search.

The leftover of a subject begins at a place. Messages from there on are on the wheel or on disk only; earlier ones are
on the wheel or in the queue. So a page enters the queues at a moment when no due message is on the wheel, together with
the messages that left the wheel meanwhile. Messages decided since then are left out.

Subjects take turns by deficit round robin. Each round adds one quantum to a subject's credit, which never exceeds one
quantum. A batch may cost more than the credit; then rounds pass until the debt is paid. So all subjects spend the same
over time, however large their batches are, and a new one waits for one batch of each other at most. Source: Shreedhar
and Varghese, Efficient fair queueing using deficit round robin (1995); with debts as in surplus round robin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qmq.delayserver.decisions import Decisions
from qmq.delayserver.schedule import DamagedSchedule, Schedule
from qmq.delayserver.schedule.record import Records, join, no_records, order_of
from qmq.delayserver.templates import LABEL
from qmq.delayserver.upkeep import ScheduleFiler
from qmq.errors import LogError
from qmq.replication.ports import Host

KEY_SHIFT = 32
"""The upper half of a label is the hash of the order key, 0 without one (qmq.codec)."""
PIECE_MAX = 5000
"""Messages of one piece: the range that is searched for the next batch."""
REMOVED_MIN = 1000
"""With fewer removed messages, the queue is not cleaned."""
FREE = -1
"""Home of a message without order key: any group takes it."""

Home = Callable[[int], str | None]
"""Label of a message with an order key -> its home broker group."""
Homes = npt.NDArray[np.int16]
"""Home of each message: a position in `PendingQueue.homes`, or FREE."""
Fits = npt.NDArray[np.bool_]


def keys_of(records: Records) -> npt.NDArray[np.uint64]:
    """Return the order key of each message, 0 without one."""
    keys: npt.NDArray[np.uint64] = records["label"] >> np.uint64(KEY_SHIFT)
    return keys


class Piece:
    """Messages that came due together, the earliest first."""

    __slots__ = ("records", "homes")

    def __init__(self, records: Records, homes: Homes) -> None:
        self.records = records
        self.homes = homes

    def keep(self, fits: Fits) -> Piece:
        return Piece(self.records[fits], self.homes[fits])

    def followed_by(self, other: Piece) -> Piece:
        return Piece(join([self.records, other.records]), np.concatenate((self.homes, other.homes)))


class PendingQueue:
    """Queue of one subject. Made by `Dispatcher` for its first due message; ends with it."""

    __slots__ = (
        "subject",
        "pieces",
        "count",
        "homes",
        "failures",
        "rests_until_ms",
        "looks_ms",
        "avoided",
        "has_warned",
        "_sharers",
        "_gone",
    )

    def __init__(self, subject: str) -> None:
        self.subject = subject
        """The name; records hold a number."""
        self.pieces: deque[Piece] = deque()
        self.count = 0
        self.homes: list[str | None] = []
        """Home groups of the messages in this queue."""
        self.failures = self.rests_until_ms = 0
        """Consecutive failures, and the end of the pause after the last one."""
        self.looks_ms = 0
        """When it next searches for a group."""
        self.avoided: dict[str, int] = {}
        """Group -> until when it gets no new batch: one was given up there, and may be stored."""
        self.has_warned = False
        self._sharers: Sequence[str] = ()
        self._gone = set[int]()
        """Numbers of removed messages: left out when messages are taken."""

    @property
    def waiting(self) -> int:
        """Waiting messages, without removed ones."""
        return max(0, self.count - len(self._gone))

    @property
    def oldest_ms(self) -> int:
        """Due time of the first message. The queue must not be empty."""
        return int(self.pieces[0].records["due"][0])

    def put(self, records: Records, sharers: Sequence[str], home: Home) -> None:
        """Put messages into the queue; `sharers` are the groups that `home` chooses from."""
        self.refresh_homes(sharers, home)
        at = len(self.pieces)
        while at and self.pieces[at - 1].records["due"][0] > records["due"][0]:
            at -= 1  # these were not stored: others with the same order keys stay behind them
        homes, is_last = self._homes_of(records, home), at == len(self.pieces)
        for begin in range(0, len(records), PIECE_MAX):
            end = begin + PIECE_MAX
            self.pieces.insert(at + begin // PIECE_MAX, Piece(records[begin:end], homes[begin:end]))
        self.count += len(records)
        if is_last:
            self._join_small()

    def _join_small(self) -> None:
        """Join small pieces: a piece of a single message takes ten times its 50 bytes."""
        pieces = self.pieces
        while len(pieces) > 1 and len(pieces[-2].records) <= 2 * len(pieces[-1].records):
            if len(pieces[-2].records) + len(pieces[-1].records) > PIECE_MAX:
                return
            last = pieces.pop()
            pieces[-1] = pieces[-1].followed_by(last)

    def refresh_homes(self, sharers: Sequence[str], home: Home) -> None:
        """Compute the homes again if other groups share the order keys now."""
        if sharers == self._sharers:
            return
        self._sharers = sharers
        self.homes = []
        for piece in self.pieces:
            piece.homes = self._homes_of(piece.records, home)

    def _homes_of(self, records: Records, home: Home) -> Homes:
        keys = keys_of(records)
        if not keys.any():
            return np.full(len(records), FREE, np.int16)
        distinct, places = np.unique(keys, return_inverse=True)
        found = [self._position(home(key << KEY_SHIFT)) if key else FREE for key in distinct.tolist()]
        return np.array(found, np.int16)[places]

    def _position(self, name: str | None) -> int:
        if name not in self.homes:
            self.homes.append(name)
        return self.homes.index(name)

    def take(self, at: int, places: npt.NDArray[np.intp]) -> Records:
        """Take the messages at these ascending places out of piece `at`."""
        piece = self.pieces[at]
        if places[-1] == len(places) - 1:
            chosen = piece.records[: len(places)]
            rest = Piece(piece.records[len(places) :], piece.homes[len(places) :])
        else:
            fits = np.zeros(len(piece.records), np.bool_)
            fits[places] = True
            chosen, rest = piece.records[fits], piece.keep(~fits)
        if len(rest.records):
            self.pieces[at] = rest
        else:
            del self.pieces[at]
        self.count -= len(chosen)
        if self._gone:
            chosen = self._without_gone(chosen)
        return chosen

    def _without_gone(self, chosen: Records) -> Records:
        fits = np.array([number not in self._gone for number in chosen["number"].tolist()], np.bool_)
        if not self.count:
            self._gone.clear()
        elif not fits.all():
            self._gone.difference_update(chosen["number"].tolist())
        return chosen if fits.all() else chosen[fits]

    def place(self, at: int) -> tuple[int, int]:
        """Return due time and number of roughly the message at position `at`, which exists."""
        for piece in self.pieces:
            if at < len(piece.records):
                record = piece.records[order_of(piece.records["due"], piece.records["number"])[at]]
                return int(record["due"]), int(record["number"])
            at -= len(piece.records)
        raise IndexError(at)

    def give_up(self, which: Callable[[Records], Fits]) -> int:
        """Take out the messages that `which` selects; return how many of them were not removed before."""
        if self._gone:
            self._drop_gone()
        before = self.count
        self._keep(lambda records: ~which(records))
        return before - self.count

    def remove(self, numbers: npt.NDArray[np.uint64]) -> None:
        """Leave these messages out from now on: they were cancelled, or moved.

        They are not searched for, which would take as long as the queue is. The queue is cleaned once when removed
        messages would be most of it.
        """
        self._gone.update(numbers.tolist())
        if 2 * len(self._gone) > max(self.count, REMOVED_MIN):
            self._drop_gone()

    def _drop_gone(self) -> None:
        gone = np.array(sorted(self._gone), np.uint64)
        self._keep(lambda records: ~np.isin(records["number"], gone))
        self._gone.clear()

    def _keep(self, which: Callable[[Records], Fits]) -> None:
        kept = (piece.keep(which(piece.records)) for piece in self.pieces)
        self.pieces = deque(piece for piece in kept if len(piece.records))
        self.count = sum(len(piece.records) for piece in self.pieces)


K = TypeVar("K")


class FairShares(dict[K, int]):
    """Fair shares: key -> credit, in the order of the round; changed only by these methods. Used on its owner's
    loop.
    """

    def __init__(self, quantum: int) -> None:
        super().__init__()
        self._quantum = quantum

    def join(self, key: K) -> None:
        """Add a key with work, behind the others, unless it is present."""
        self.setdefault(key, 0)

    def leave(self, key: K) -> None:
        """Remove a key without work; its debt is forgotten."""
        self.pop(key, None)

    def has_credit(self, key: K) -> bool:
        return self.get(key, 0) > 0

    def spend(self, key: K, cost: int) -> None:
        """Charge a key; the next pass begins with the others."""
        self[key] = self.pop(key) - cost

    def rounds(self, candidates: list[K]) -> Iterator[K]:
        """Yield the keys that may spend, round by round. A key that spends nothing leaves the coming rounds.

        Args:
            candidates: keys that may be able to send now, in the order of the round.
        """
        order = deque(candidates)
        while order:
            key = order.popleft()
            if key not in self:
                continue
            self[key] = credit = min(self[key] + self._quantum, self._quantum)
            if credit > 0:
                yield key
                if self.get(key) == credit:
                    continue
            order.append(key)


PAGE_MAX = 500_000
"""Messages read at a time, 24 MB: searching a segment for a few takes as long."""
BACK_MAX = 65_536
"""Messages that return in one pass, 10 ms."""


class Place(NamedTuple):
    """Position in the order of due times."""

    due_ms: int
    number: int

    def behind(self, records: Records) -> Fits:
        """Return which records are here or behind. Templates never are: they wait elsewhere (delayserver.recurring)."""
        dues = records["due"]
        later = (dues > self.due_ms) | ((dues == self.due_ms) & (records["number"] >= self.number))
        fits: Fits = later & (records["label"] != LABEL)
        return fits


@dataclass(slots=True)
class Leftover:
    """Due messages of a subject that are on disk only. They are read when its queue has fewer than `least` messages."""

    begin: Place
    messages: int
    least: int


@dataclass(slots=True)
class _Page:
    """Page of the next messages of some subjects, from its request on, with the messages that left the wheel since."""

    schedule: Schedule
    subjects: set[int]
    found: Records | None = None
    at: int = 0
    is_last: bool = False
    meanwhile: list[Records] = field(default_factory=list)


class Leftovers:
    """Due messages on disk only. Made by the master; ends with the mastership.

    Args:
        most: messages that the queues may hold.
        waiting: returns the length of a subject's queue.
    """

    def __init__(
        self, filing: ScheduleFiler, host: Host, decisions: Decisions, most: int, waiting: Callable[[int], int]
    ) -> None:
        self._filing = filing
        self._host = host
        self._decisions = decisions
        self._most = most
        self._waiting = waiting
        self._of: dict[int, Leftover] = {}
        self._wanted: dict[int, None] = {}
        """Subjects with a queue that may have run low."""
        self._page: _Page | None = None
        self._arrived_messages = 0
        self._taken_ms = 0

    @property
    def is_empty(self) -> bool:
        return not self._of

    @property
    def messages(self) -> int:
        """Due messages that are on disk only."""
        return sum(left.messages for left in self._of.values())

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield subject, number of messages, and earliest due time, for each subject."""
        for subject, left in self._of.items():
            yield subject, left.messages, left.begin.due_ms

    def forget(self) -> None:
        """Forget everything: the schedule was rebuilt, and the queues are empty."""
        self._of.clear()
        self._wanted.clear()
        self._page = None

    # Queues gain and lose messages.

    def arrived(self, subject: int, records: Records) -> Records:
        """Return those of the newly due messages that belong into the queue."""
        self._arrived_messages += len(records)
        left = self._of.get(subject)
        if left is None or not (stays := left.begin.behind(records)).any():
            return records
        left.messages += int(np.count_nonzero(stays))
        if self._page is not None and subject in self._page.subjects:
            self._page.meanwhile.append(records[stays])
        return records[~stays]

    def gone(self, subject: int, records: Records) -> Records:
        """Return those of the settled messages that may be in the queue."""
        left = self._of.get(subject)
        if left is None:
            return records
        stays = left.begin.behind(records)
        left.messages -= min(left.messages, int(np.count_nonzero(stays & (records["due"] <= self._taken_ms))))
        return records[~stays]

    def ran_low(self, subject: int, count: int) -> None:
        """Note a queue that has `count` messages left."""
        left = self._of.get(subject)
        if left is not None and count < left.least:
            self._wanted[subject] = None

    def make_room(self, queues: Iterable[tuple[int, PendingQueue]]) -> None:
        """Cut the longest queues if they hold too much; checks only now and then."""
        if self._arrived_messages < max(1, self._most // 16):
            return
        self._arrived_messages, queues = 0, list(queues)
        counts = np.array([queue.count for _, queue in queues])
        if counts.sum() <= self._most:
            return
        count_max = _count_max(counts, self._most // 2)
        for subject, queue in queues:
            if queue.count > count_max:
                self._cut(subject, queue, count_max)

    def _cut(self, subject: int, queue: PendingQueue, most: int) -> None:
        begin = Place(*queue.place(most))
        cut = queue.give_up(begin.behind)
        if not cut:
            return
        if self._page is not None:
            self._page.subjects.discard(subject)  # it will be read from further on
        left = self._of.get(subject)
        if left is not None:
            cut, begin = cut + left.messages, min(begin, left.begin)
        self._of[subject] = Leftover(begin, cut, max(1, queue.count // 2))
        self.ran_low(subject, queue.count)

    # Messages return.

    def go_on(self, taken_ms: int, *, all_taken: bool) -> Records:
        """Return the messages that enter the queues now, maybe none.

        Args:
            taken_ms: messages due by then were taken off the wheel, or are next.
            all_taken: none of them is on the wheel.
        """
        self._taken_ms = taken_ms
        if not all_taken:
            return no_records()
        if self._page is None:
            self._read()
        elif self._page.found is not None:
            try:
                return self._next_of(self._page, self._page.found)
            except DamagedSchedule as problem:
                self._filing.rebuild_damaged(self._page.schedule, problem)
        return no_records()

    def _read(self) -> None:
        """Read a page for all subjects with a short queue."""
        wanted, self._wanted = self._wanted, {}
        low = {subject for subject in wanted if subject in self._of and self._is_low(subject)}
        if not low:
            return
        schedule, most = self._filing.schedule, max(1, min(PAGE_MAX, self._most // 4))
        begins = {subject: self._of[subject].begin for subject in low}
        self._page = page = _Page(schedule, low)

        def done(result: Records | LogError) -> None:
            if self._page is not page:
                return
            if isinstance(result, DamagedSchedule):
                self._filing.rebuild_damaged(schedule, result)
            elif isinstance(result, LogError):
                raise result  # the disk failed
            else:
                page.found, page.is_last = result, len(result) < most
            self._host.pass_soon()

        self._host.read(schedule.pending_of(begins, self._taken_ms + 1, most), done)

    def _is_low(self, subject: int) -> bool:
        return self._waiting(subject) < self._of[subject].least

    def _next_of(self, page: _Page, found: Records) -> Records:
        """Return the next part of a page, and move the places of its subjects behind it."""
        part = found[page.at : page.at + BACK_MAX]
        page.at += len(part)
        is_read = page.at == len(found)
        more = join([no_records(), *page.meanwhile])
        if is_read and page.is_last:
            end = None
        else:
            end = Place(int(part["due"][-1]), int(part["number"][-1]) + 1)
            later = end.behind(more)
            page.meanwhile, more = [more[later]], more[~later]
        back = self._pending_among(page, _by_place(join([part, more])) if len(more) else part)
        subjects, counts = np.unique(back["subject"], return_counts=True)
        came = dict(zip(subjects.tolist(), counts.tolist(), strict=True))
        for subject in page.subjects:
            self._moved(subject, end, came.get(subject, 0))
        if is_read:
            self._page = None
            self._wanted |= dict.fromkeys(page.subjects)
        self._host.pass_soon()
        return back

    def _pending_among(self, page: _Page, records: Records) -> Records:
        fits = np.isin(records["subject"], list(page.subjects)) & (records["label"] != LABEL)
        return self._decisions.not_named(page.schedule.pending_among(records[fits]))

    def _moved(self, subject: int, end: Place | None, count: int) -> None:
        """Account for `count` returned messages, all before `end`; None: none are left."""
        if end is None:
            del self._of[subject]
            return
        left = self._of[subject]
        left.begin, left.messages = max(left.begin, end), max(0, left.messages - count)


def _by_place(records: Records) -> Records:
    """Return each record once, in the order of due times."""
    once = records[np.unique(records["number"], return_index=True)[1]]
    return once.take(order_of(once["due"], once["number"]))


def _count_max(counts: npt.NDArray[np.int64], most: int) -> int:
    """Return the length to which queues are cut so that about `most` messages are left in all; at least one."""
    ascending = np.sort(counts)
    before = np.cumsum(ascending) - ascending
    sizes = (most - before) // np.arange(len(ascending), 0, -1)
    return max(1, int(sizes[np.argmax(ascending > sizes)]))
