"""Core. The wheel: messages that are loaded, in the order in which they come due; 40 bytes each.

Sorted runs of arrays. What is added is a run; runs of about the same length are merged, up to 65,536 messages, so that
no step takes longer than some milliseconds, however many messages are loaded or due at once. What is taken off it is
left in its run with size 0 until its time comes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from delayserver.schedule.record import RECORD, Numbers, Records, no_records

_REST = np.dtype(
    [("number", "<u8"), ("label", "<u8"), ("size", "<u4"), ("subject", "<u4"), ("crc", "<u4"), ("row", "<u4")]
)
"""Due times have an array of their own, that searching needs no copy."""
_REST_BYTES = np.dtype((np.void, _REST.itemsize))
"""As bytes, records are copied ten times as fast."""
RUN_MAX = 65_536
SAMPLES = 32_768
"""From so many due times it is told when most of the others are due."""


class _Run:
    """Messages by due time; those before `begin` were taken."""

    __slots__ = ("dues", "rest", "begin")

    def __init__(self, dues: Numbers, rest: Records) -> None:
        self.dues, self.rest, self.begin = dues, rest, 0

    def __len__(self) -> int:
        return len(self.dues) - self.begin

    def due(self, now_ms: np.uint64, most: int) -> Numbers:
        """Return the due times of up to `most` messages that are due."""
        end = int(np.searchsorted(self.dues, now_ms, "right"))
        return self.dues[self.begin : min(end, self.begin + most)]

    def take(self, count: int) -> tuple[Numbers, Records]:
        begin, self.begin = self.begin, self.begin + count
        end = self.begin
        taken = self.dues[begin:end], self.rest[begin:end]
        if 8 * end > len(self.dues):  # give back the memory
            self.dues, self.rest, self.begin = self.dues[end:].copy(), self.rest[end:].copy(), 0
        return taken


    def cut(self, end_ms: np.uint64) -> int:
        """Drop what is due at `end_ms` or later; return how many were dropped that nobody had removed."""
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
    order = np.argsort(dues)
    return _Run(dues.take(order), rest.take(order))  # ten times as fast as indexing


def _merge(first: _Run, second: _Run) -> _Run:
    parts = [(run.dues[run.begin :], run.rest[run.begin :]) for run in (first, second)]
    dues = np.concatenate([dues for dues, _ in parts])
    rest = np.concatenate([rest.view(_REST_BYTES) for _, rest in parts]).view(_REST)
    live = rest["size"] > 0
    return _sorted_run(dues, rest) if live.all() else _sorted_run(dues[live], rest[live])


class Wheel:
    """Made with a reign, by its master; used on its loop."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._count = 0
        self._removed: list[Records] = []

    def __len__(self) -> int:
        self._apply_removed()
        return self._count

    @property
    def bytes(self) -> int:
        return sum(run.dues.nbytes + run.rest.nbytes for run in self._runs)

    @property
    def next_due_ms(self) -> int | None:
        """When the next message is due, or maybe one that was removed; None: never."""
        return min((int(run.dues[run.begin]) for run in self._runs), default=None)

    def add(self, records: Records) -> None:
        """Add messages, of RECORD or as they were taken."""
        self._apply_removed()
        for begin in range(0, len(records), RUN_MAX):
            some = records[begin : begin + RUN_MAX]
            rest = np.empty(len(some), _REST)
            for name in _REST.names or ():
                rest[name] = some[name]
            self._runs.append(_sorted_run(some["due"].copy(), rest))
        self._count += len(records)
        runs = self._runs
        runs.sort(key=len, reverse=True)  # few are long, the others at least twice as long as the next
        while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]) and len(runs[-2]) + len(runs[-1]) <= RUN_MAX:
            merged = _merge(runs[-2], runs[-1])
            del runs[-2:]
            if len(merged):
                runs.append(merged)

    def take(self, now_ms: int, most: int) -> Records:
        """Take up to `most` messages that are due at `now_ms`, the earliest first; none only if none is due.

        The hashes that their records had are not kept.
        """
        self._apply_removed()
        now = np.uint64(max(now_ms, 0))
        while due := [(run, run.due(now, most)) for run in self._runs if run.dues[run.begin] <= now]:
            taken = self._take(due, most)
            if len(taken):
                return taken
        return no_records()

    def _take(self, due: list[tuple[_Run, Numbers]], most: int) -> Records:
        """Take the earliest; fewer or none if some of them were removed."""
        parts = [run.take(count) for (run, _), count in zip(due, _shares(due, most), strict=True)]
        self._runs = [run for run in self._runs if len(run)]
        dues = np.concatenate([dues for dues, _ in parts])
        rest = np.concatenate([rest.view(_REST_BYTES) for _, rest in parts]).view(_REST)
        order = np.argsort(dues, kind="stable")
        order = order[rest["size"][order] > 0]
        self._count -= len(order)
        return _join(dues[order], rest.take(order))

    def cut(self, most: int, least_ms: int) -> int:
        """Drop what is due last, that about `most` messages are left; return when the first that was dropped is due.

        Nothing is dropped that is due before `least_ms`, or first.
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
        """Remove messages, of RECORD or as they were taken; those that are not there are ignored."""
        if len(records):
            self._removed.append(records)

    def _apply_removed(self) -> None:
        """Many removals cost little more than one: each looks into every run."""
        if not self._removed:
            return
        numbers = np.concatenate([records["number"] for records in self._removed])
        dues = np.concatenate([records["due"] for records in self._removed])
        self._removed = []
        for run in self._runs:
            self._count -= _remove(run, numbers, dues)


def _shares(due: list[tuple[_Run, Numbers]], most: int) -> list[int]:
    """Return how many each run gives, that together the earliest `most` are taken."""
    counts = [len(dues) for _, dues in due]
    if sum(counts) <= most:
        return counts
    dues = np.concatenate([dues for _, dues in due])
    last = np.partition(dues, most - 1)[most - 1]
    shares = [int(np.searchsorted(dues, last, "left")) for _, dues in due]
    left = most - sum(shares)
    for position, (_, dues) in enumerate(due):
        more = min(left, int(np.searchsorted(dues, last, "right")) - shares[position])
        shares[position] += more
        left -= more
    return shares


def _remove(run: _Run, numbers: Numbers, dues: Numbers) -> int:
    """Set the size of these messages to 0; return how many were there."""
    left = np.maximum(np.searchsorted(run.dues, dues, "left"), run.begin)
    right = np.searchsorted(run.dues, dues, "right")
    hits: NDArray[np.bool_] = left < right
    removed = 0
    for number, begin, end in zip(numbers[hits].tolist(), left[hits].tolist(), right[hits].tolist(), strict=True):
        same = begin + np.flatnonzero(run.rest["number"][begin:end] == number)
        same = same[run.rest["size"][same] > 0]
        run.rest["size"][same] = 0
        removed += len(same)
    return removed
