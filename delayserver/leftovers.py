"""Core. Due messages that would be too many for memory: the rest of a subject's queue stays on disk, and comes back.

When the queues hold more than may be loaded, the longest are cut until half of that is left, so a subject that can be
sent keeps all it has beside one that cannot. What was cut off still pends in the schedule. A subject whose queue runs
low is read again from there, a page at a time, many subjects in one look.

For each subject with a leftover holds: what pends from its place on is on the wheel or on disk alone, what pends
before is on the wheel or in the queue. So a page is put into the queues at a moment in which nothing that is due is on
the wheel, together with what came off it meanwhile; what a frame decided about since then is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.delayserver.decisions import Decisions
from qmq.delayserver.filing import Filing
from qmq.delayserver.messages import Records
from qmq.delayserver.pending import Fits, PendingQueue
from qmq.delayserver.schedule import DamagedSchedule, Schedule
from qmq.delayserver.schedule.record import join, no_records, order_of
from qmq.delayserver.templates import LABEL
from qmq.errors import LogError
from qmq.replication.ports import Host

PAGE_MAX = 500_000
"""Messages read at a time, 24 MB: looking through a segment takes as long for a few."""
BACK_MAX = 65_536
"""Messages that come back in one pass, 10 ms."""


class Place(NamedTuple):
    """A place in the order in which messages come due."""

    due_ms: int
    number: int

    def behind(self, records: Records) -> Fits:
        """Return which of these are here or behind; templates never, which wait elsewhere (delayserver.recurring)."""
        dues = records["due"]
        later = (dues > self.due_ms) | ((dues == self.due_ms) & (records["number"] >= self.number))
        fits: Fits = later & (records["label"] != LABEL)
        return fits


@dataclass(slots=True)
class Leftover:
    """What of a subject is due and on disk alone. `least`: with fewer in its queue, it is read."""

    begin: Place
    messages: int
    least: int


@dataclass(slots=True)
class _Page:
    """What is being read, or was: the next messages of some subjects, and what came off the wheel meanwhile."""

    schedule: Schedule
    subjects: set[int]
    found: Records | None = None
    at: int = 0
    is_last: bool = False
    meanwhile: list[Records] = field(default_factory=list)


class Leftovers:
    """Made by the master; ends with the mastership.

    Args:
        most: messages that the queues may hold.
        waiting: says how many a subject's queue holds.
    """

    def __init__(
        self, filing: Filing, host: Host, decisions: Decisions, most: int, waiting: Callable[[int], int]
    ) -> None:
        self._filing, self._host, self._decisions = filing, host, decisions
        self._most, self._waiting = most, waiting
        self._of: dict[int, Leftover] = {}
        self._wanted: dict[int, None] = {}
        """Subjects whose queue may have run low."""
        self._page: _Page | None = None
        self._came = 0
        self._taken_ms = 0

    @property
    def is_empty(self) -> bool:
        return not self._of

    @property
    def messages(self) -> int:
        """Messages that are due and on disk alone."""
        return sum(left.messages for left in self._of.values())

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield subject, messages, and when the first of them was due, of each subject."""
        for subject, left in self._of.items():
            yield subject, left.messages, left.begin.due_ms

    def forget(self) -> None:
        """The schedule is another one, and nothing is in a queue."""
        self._of.clear()
        self._wanted.clear()
        self._page = None

    # What the queues get, and give up.

    def arrived(self, subject: int, records: Records) -> Records:
        """These are due: return what belongs into the queue."""
        self._came += len(records)
        left = self._of.get(subject)
        if left is None or not (stays := left.begin.behind(records)).any():
            return records
        left.messages += int(np.count_nonzero(stays))
        if self._page is not None and subject in self._page.subjects:
            self._page.meanwhile.append(records[stays])
        return records[~stays]

    def gone(self, subject: int, records: Records) -> Records:
        """These pend no more: return what may be in the queue."""
        left = self._of.get(subject)
        if left is None:
            return records
        stays = left.begin.behind(records)
        left.messages -= min(left.messages, int(np.count_nonzero(stays & (records["due"] <= self._taken_ms))))
        return records[~stays]

    def ran_low(self, subject: int, count: int) -> None:
        """The queue of a subject has `count` messages left."""
        left = self._of.get(subject)
        if left is not None and count < left.least:
            self._wanted[subject] = None

    def make_room(self, queues: Iterable[tuple[int, PendingQueue]]) -> None:
        """Cut the longest queues, if they hold too much; looks only now and then."""
        if self._came < max(1, self._most // 16):
            return
        self._came, queues = 0, list(queues)
        counts = np.array([queue.count for _, queue in queues])
        if counts.sum() <= self._most:
            return
        level = _level(counts, self._most // 2)
        for subject, queue in queues:
            if queue.count > level:
                self._cut(subject, queue, level)

    def _cut(self, subject: int, queue: PendingQueue, most: int) -> None:
        begin = Place(*queue.place(most))
        cut = queue.give_up(begin.behind)
        if not cut:
            return
        if self._page is not None:
            self._page.subjects.discard(subject)  # it is read from further on
        left = self._of.get(subject)
        if left is not None:
            cut, begin = cut + left.messages, min(begin, left.begin)
        self._of[subject] = Leftover(begin, cut, max(1, queue.count // 2))
        self.ran_low(subject, queue.count)

    # What comes back.

    def go_on(self, taken_ms: int, *, all_taken: bool) -> Records:
        """Return what comes back now, maybe nothing.

        Args:
            taken_ms: what is due by then was taken off the wheel, or is next.
            all_taken: nothing of it is on the wheel.
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
                self._filing.is_damaged(self._page.schedule, problem)
        return no_records()

    def _read(self) -> None:
        """Read a page of all subjects whose queue runs low."""
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
                self._filing.is_damaged(schedule, result)
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
        back = self._that_pend(page, _by_place(join([part, more])) if len(more) else part)
        subjects, counts = np.unique(back["subject"], return_counts=True)
        came = dict(zip(subjects.tolist(), counts.tolist(), strict=True))
        for subject in page.subjects:
            self._moved(subject, end, came.get(subject, 0))
        if is_read:
            self._page = None
            self._wanted |= dict.fromkeys(page.subjects)
        self._host.pass_soon()
        return back

    def _that_pend(self, page: _Page, records: Records) -> Records:
        fits = np.isin(records["subject"], list(page.subjects)) & (records["label"] != LABEL)
        return self._decisions.not_named(page.schedule.that_pend(records[fits]))

    def _moved(self, subject: int, end: Place | None, count: int) -> None:
        """`count` messages came back, all before `end`; None: all there are."""
        if end is None:
            del self._of[subject]
            return
        left = self._of[subject]
        left.begin, left.messages = max(left.begin, end), max(0, left.messages - count)


def _by_place(records: Records) -> Records:
    """Return each once, in the order in which they come due."""
    once = records[np.unique(records["number"], return_index=True)[1]]
    return once.take(order_of(once["due"], once["number"]))


def _level(counts: npt.NDArray[np.int64], most: int) -> int:
    """Return to which length queues are cut, that about `most` messages are left in all; at least one."""
    ascending = np.sort(counts)
    before = np.cumsum(ascending) - ascending
    levels = (most - before) // np.arange(len(ascending), 0, -1)
    return max(1, int(levels[np.argmax(ascending > levels)]))
