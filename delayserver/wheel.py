"""Core. The wheel: loaded messages in the order in which they come due, 40 bytes each; and its loading.

The wheel is a list of sorted runs. Each addition is a run. Runs of similar length are merged, up to 65,536 messages. So
no step takes longer than some milliseconds, however many messages are loaded or due at once. Removal sets a message's
size to 0.

Segments of the schedule are loaded piece by piece before anything in them is due. Messages that are filed or cancelled
meanwhile come from the schedule as soon as a segment's first piece was requested. Pieces come in the order of the log:
no message leaves the wheel before all earlier ones are loaded.

Above the limit, the messages due last are dropped from the wheel, and the schedule leaves them out from then on. When
most of the rest is gone, their segments are read again.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Literal

import numpy as np

from qmq.delayserver.schedule import DamagedSchedule
from qmq.delayserver.schedule.record import RECORD, Numbers, Records, no_records, order_of
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.upkeep import ScheduleFiler
from qmq.errors import LogError
from qmq.replication.ports import Host

log = logging.getLogger(__name__)

_REST = np.dtype(
    [("number", "<u8"), ("label", "<u8"), ("size", "<u4"), ("subject", "<u4"), ("crc", "<u4"), ("row", "<u4")]
)
"""Due times have their own array, so searching needs no copy."""
_REST_BYTES = np.dtype((np.void, _REST.itemsize))
"""As bytes, records are copied ten times as fast."""
RUN_MAX = 65_536
REMOVED_MAX = 500
"""Messages removed at once: 1 to 2 ms."""
_NEVER_MS = 1 << 63
SAMPLES = 32_768
"""Sample of due times from which a cut is computed."""


class _Run:
    """Messages by due time; those before `begin` were taken."""

    __slots__ = ("dues", "rest", "begin")

    def __init__(self, dues: Numbers, rest: Records) -> None:
        self.dues = dues
        self.rest = rest
        self.begin = 0

    def __len__(self) -> int:
        return len(self.dues) - self.begin

    def end(self, now_ms: np.uint64, side: Literal["left", "right"]) -> int:
        """Return the end of the messages due before `now_ms` (left), or also at `now_ms` (right)."""
        return max(self.begin, int(np.searchsorted(self.dues, now_ms, side)))

    def take(self, count: int) -> tuple[Numbers, Records]:
        begin, self.begin = self.begin, self.begin + count
        end = self.begin
        taken = self.dues[begin:end], self.rest[begin:end]
        if 2 * end > len(self.dues):  # frees the memory
            self.dues, self.rest, self.begin = self.dues[end:].copy(), self.rest[end:].copy(), 0
        return taken

    def cut(self, end_ms: np.uint64) -> int:
        """Drop messages due at `end_ms` or later; return how many of them were not removed."""
        end = max(self.begin, int(np.searchsorted(self.dues, end_ms, "left")))
        dropped = int(np.count_nonzero(self.rest["size"][end:]))
        if end < len(self.dues):
            self.dues, self.rest, self.begin = self.dues[self.begin : end].copy(), self.rest[self.begin : end].copy(), 0
        return dropped


def _join(dues: Numbers, rest: Records) -> Records:
    joined = np.zeros(len(dues), RECORD)
    joined["due"] = dues
    for name in _REST.names or ():
        joined[name] = rest[name]
    return joined


def _sorted_run(dues: Numbers, rest: Records) -> _Run:
    order = order_of(dues, rest["number"])
    return _Run(dues.take(order), rest.take(order))  # ten times as fast as indexing


def _merge(first: _Run, second: _Run) -> _Run:
    parts = [(run.dues[run.begin :], run.rest[run.begin :]) for run in (first, second)]
    dues = np.concatenate([dues for dues, _ in parts])
    rest = np.concatenate([rest.view(_REST_BYTES) for _, rest in parts]).view(_REST)
    live = rest["size"] > 0
    return _sorted_run(dues, rest) if live.all() else _sorted_run(dues[live], rest[live])


class Wheel:
    """Loaded messages in the order of their due times. Made with a mastership, by its master; used on its loop."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._count = 0
        self._removed: list[Records] = []
        self._removed_rows = 0
        self._due_from_ms = _NEVER_MS
        """No message is due before, so an empty look-up is free."""

    def __len__(self) -> int:
        self._apply_removed()
        return self._count

    @property
    def rows(self) -> int:
        """Messages on the wheel, with some that were removed just now."""
        return self._count

    @property
    def bytes(self) -> int:
        return sum(run.dues.nbytes + run.rest.nbytes for run in self._runs)

    @property
    def next_due_ms(self) -> int | None:
        """Due time of the next message, which may be removed; None if the wheel is empty."""
        return min((int(run.dues[run.begin]) for run in self._runs), default=None)

    def add(self, records: Records) -> None:
        """Add messages, as RECORD or as `take` returned them; never one that was removed."""
        for begin in range(0, len(records), RUN_MAX):
            some = records[begin : begin + RUN_MAX]
            rest = np.empty(len(some), _REST)
            for name in _REST.names or ():
                rest[name] = some[name]
            self._runs.append(_sorted_run(some["due"].copy(), rest))
        self._count += len(records)
        if len(records):
            self._due_from_ms = min(self._due_from_ms, int(records["due"].min()))
        runs = self._runs
        runs.sort(key=len, reverse=True)  # few runs are long, each other one at least twice as long as the next
        while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]) and len(runs[-2]) + len(runs[-1]) <= RUN_MAX:
            merged = _merge(runs[-2], runs[-1])
            del runs[-2:]
            if len(merged):
                runs.append(merged)

    def take(self, now_ms: int, most: int) -> Records:
        """Take up to `most` messages due at `now_ms`, the earliest first; none only if none is due.

        Hashes of their records are not kept.
        """
        if now_ms < self._due_from_ms:
            return no_records()
        now = np.uint64(max(now_ms, 0))
        while due := [run for run in self._runs if run.dues[run.begin] <= now]:
            self._apply_removed()
            taken = self._join(self._take(due, now, most))
            if len(taken):
                return taken
        next_ms = self.next_due_ms
        self._due_from_ms = _NEVER_MS if next_ms is None else next_ms
        return no_records()

    def due(self, now_ms: int) -> int:
        """Return how many messages are due and not taken; some may be removed."""
        now = np.uint64(max(now_ms, 0))
        return sum(run.end(now, "right") - run.begin for run in self._runs)

    def _take(self, due: list[_Run], now: np.uint64, most: int) -> list[tuple[Numbers, Records]]:
        """Take about `most` of the earliest messages; at least one.

        The time depends only on the number taken, not on the number or content of the runs.
        """
        ends = [run.end(now, "right") for run in due]
        if sum(end - run.begin for run, end in zip(due, ends, strict=True)) <= most:
            return [run.take(end - run.begin) for run, end in zip(due, ends, strict=True)]
        taken, left = list[tuple[Numbers, Records]](), most
        while left >= len(due) or not taken:
            due = [run for run in due if len(run) and run.dues[run.begin] <= now]
            if not due:
                break
            step = max(1, left // len(due))
            until = min(run.dues[min(run.begin + step, len(run.dues)) - 1] for run in due)
            counts = [run.end(until, "left") - run.begin for run in due]  # fewer than `step` of each
            if not any(counts):  # the first ones are due at one moment: they have no order
                counts = _first(left, [run.end(until, "right") - run.begin for run in due])
            taken += [run.take(count) for run, count in zip(due, counts, strict=True) if count]
            left = most - sum(len(dues) for dues, _ in taken)
        return taken

    def _join(self, parts: list[tuple[Numbers, Records]]) -> Records:
        """Return taken messages that were not removed, as records, by due time and number."""
        self._runs = [run for run in self._runs if len(run)]
        dues = np.concatenate([dues for dues, _ in parts])
        rest = np.concatenate([rest.view(_REST_BYTES) for _, rest in parts]).view(_REST)
        order = order_of(dues, rest["number"])
        order = order[rest["size"][order] > 0]
        self._count -= len(order)
        return _join(dues[order], rest.take(order))

    def cut(self, most: int, least_ms: int) -> int:
        """Drop the messages due last so that about `most` are left; return the earliest due time that was dropped.

        Messages due before `least_ms`, and the first one, are kept.
        """
        self._apply_removed()
        step = max(1, sum(map(len, self._runs)) // SAMPLES)
        samples = np.concatenate([run.dues[run.begin :: step] for run in self._runs])
        place = min(most // step, len(samples) - 1)
        end_ms = max(int(np.partition(samples, place)[place]), int(samples.min()) + 1, least_ms)
        for run in self._runs:
            self._count -= run.cut(np.uint64(end_ms))
        self._runs = [run for run in self._runs if len(run)]
        return end_ms

    def remove(self, records: Records) -> None:
        """Remove messages, as RECORD or as `take` returned them; unknown ones are ignored.

        Removals are collected until something is due or they are many: applying them searches every run.
        """
        if len(records):
            self._removed.append(records)
            self._removed_rows += len(records)
            if self._removed_rows >= REMOVED_MAX:
                self._apply_removed()

    def _apply_removed(self) -> None:
        if not self._removed:
            return
        numbers = np.concatenate([records["number"] for records in self._removed])
        dues = np.concatenate([records["due"] for records in self._removed])
        self._removed = []
        self._removed_rows = 0
        for run in self._runs:
            self._count -= _remove(run, numbers, dues)


def _first(most: int, counts: list[int]) -> list[int]:
    """Return counts that add up to `most`, taken from the first entries first."""
    chosen = []
    for count in counts:
        chosen.append(min(count, most))
        most -= chosen[-1]
    return chosen


def _remove(run: _Run, numbers: Numbers, dues: Numbers) -> int:
    """Set the size of these messages to 0; return how many existed.

    Messages of one due time are ordered by number and found by binary search, so the time does not grow with them.
    """
    begins = np.maximum(np.searchsorted(run.dues, dues, "left"), run.begin)
    ends = np.searchsorted(run.dues, dues, "right")
    known = run.rest["number"]
    fits = np.flatnonzero(begins < ends)
    fits = fits[(known[begins[fits]] <= numbers[fits]) & (known[ends[fits] - 1] >= numbers[fits])]
    found, searched = set[int](), known.data
    for number, begin, end in zip(numbers[fits].tolist(), begins[fits].tolist(), ends[fits].tolist(), strict=True):
        at = bisect_left(searched, number, begin, end)
        if at < end and searched[at] == number:
            found.add(at)
    if not found:
        return 0
    places = np.array(list(found))
    places = places[run.rest["size"][places] > 0]
    run.rest["size"][places] = 0
    return len(places)


class WheelLoader:
    """Loader of one wheel from one schedule. Made by the master. `loaded` is called with each piece."""

    def __init__(
        self,
        filing: ScheduleFiler,
        wheel: Wheel,
        host: Host,
        settings: DelaySettings,
        loaded: Callable[[Records], None],
    ) -> None:
        self._loaded = loaded
        self._filing = filing
        self._schedule = filing.schedule
        self._wheel = wheel
        self._host = host
        self._ahead_ms = int(settings.load_ahead_minutes * 60_000)
        self._most = self._full = settings.loaded_messages_max
        """`_full`: size that triggers a drop. It exceeds the limit if most messages are due at one moment."""
        self._left_from_ms = self._kept_until_ms = 0
        """Earliest due time of the last drop, and the due time before which nothing is dropped any more."""
        self._is_reading = False
        self.taken_ms = 0
        """Messages due by then were taken, or are next."""

    def take(self, now_ms: int, most: int) -> Records:
        """Take due messages off the wheel, the earliest first, as long as all earlier ones are loaded."""
        due_ms = min(now_ms, self._schedule.loaded_until_ms - 1)
        self.taken_ms = max(self.taken_ms, due_ms)  # a wrong clock may have stepped back
        return self._wheel.take(due_ms, most)

    @property
    def due(self) -> int:
        """Due messages that are still on the wheel."""
        return self._wheel.due(self.taken_ms)

    @property
    def all_taken(self) -> bool:
        """Whether no due message is on the wheel."""
        next_ms = self._wheel.next_due_ms
        return next_ms is None or next_ms > self.taken_ms

    @property
    def is_idle(self) -> bool:
        """Whether no read is running."""
        return not self._is_reading

    def go_on(self, now_ms: int) -> None:
        """Load the next piece if there is one and room for it. `now_ms` is the mastership's clock."""
        if self._filing.schedule is not self._schedule:
            return
        if self._wheel.rows > self._full:
            self._drop()
        if self._is_reading:
            return
        piece = self._schedule.next_piece(now_ms + self._ahead_ms)
        if piece is None:
            if self._wheel.rows <= self._most // 4 and self._schedule.go_further():
                log.warning("wheel is loading again messages=%d", len(self._wheel))
                self._full = self._most
                self._kept_until_ms = self._left_from_ms + 1  # else one moment would be dropped and loaded forever
                self._host.pass_soon()
            return
        self._is_reading = True

        def done(result: Records | LogError) -> None:
            self._is_reading = False
            try:
                if isinstance(result, LogError):
                    raise result
                records = self._schedule.handed(piece, result)
                self._wheel.add(records)
                self._loaded(records)
            except DamagedSchedule as problem:
                self._filing.rebuild_damaged(self._schedule, problem)
            self._host.pass_soon()

        self._host.read(piece.read, done)

    def _drop(self) -> None:
        """Drop a quarter of the limit, so drops are rare. Due messages are kept, and no due time is dropped twice."""
        count = len(self._wheel)
        kept_until_ms = max(self.taken_ms + 1, self._kept_until_ms)
        self._left_from_ms = self._wheel.cut(self._most // 4 * 3, kept_until_ms)
        self._schedule.leave(self._left_from_ms)
        self._full = max(self._most, len(self._wheel) + self._most // 4)
        log.warning("wheel is full messages=%d left for later=%d", count, count - len(self._wheel))
