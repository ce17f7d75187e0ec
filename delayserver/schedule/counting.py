"""Core. How many messages are not done: in all, per subject and hour, and per stretch of the log.

Pending and in flight count alike here: a message is done when it was stored at a broker, cancelled, or moved.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.ma  # np.unique imports it when it is first called: 0.2 s in which nobody is served

from qmq.delayserver.schedule.record import Records, join

HOUR_MS = 3_600_000
STRETCH_BITS = 22
"""4 MiB: how exactly `lowest` knows where the oldest message lies. A TiB of log has 262,144 stretches."""
_HOUR_BITS = 42


LATER_ROWS = 4096
"""Counting takes 30 µs however few there are, so some are counted together; who reads the counts calls `settle`."""


class Counts:
    def __init__(self) -> None:
        self.messages = self.bytes = 0
        self.hours: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """hour since 1970 -> subject -> messages"""
        self.stretches: dict[int, int] = {}
        """stretch of the log -> messages in it"""
        self._added: list[Records] = []
        self._removed: list[Records] = []
        self._later = 0

    def add(self, records: Records) -> None:
        self._added.append(records)
        self._note(len(records))

    def remove(self, records: Records) -> None:
        self._removed.append(records)
        self._note(len(records))

    def _note(self, rows: int) -> None:
        self._later += rows
        if self._later >= LATER_ROWS:
            self.settle()

    def settle(self) -> None:
        """Count what was only noted."""
        if self._added:
            self._count(join(self._added), 1)
        if self._removed:
            self._count(join(self._removed), -1)
        self._added, self._removed, self._later = [], [], 0

    def copy(self) -> Counts:
        """Return a copy for a thread."""
        self.settle()
        copy = Counts()
        copy.messages, copy.bytes, copy.stretches = self.messages, self.bytes, self.stretches.copy()
        copy.hours.update((hour, subjects.copy()) for hour, subjects in self.hours.items())
        return copy

    def _count(self, records: Records, sign: int) -> None:
        self.messages += sign * len(records)
        self.bytes += sign * int(records["size"].sum(dtype=np.int64))
        hours = (records["due"] // np.uint64(HOUR_MS)).astype(np.int64)
        keys, counts = np.unique(records["subject"].astype(np.int64) << _HOUR_BITS | hours, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            subject, hour = key >> _HOUR_BITS, key & (1 << _HOUR_BITS) - 1
            _change(self.hours[hour], subject, sign * count)
            if not self.hours[hour]:
                del self.hours[hour]
        stretches, counts = np.unique(records["number"] >> np.uint64(STRETCH_BITS), return_counts=True)
        for stretch, count in zip(stretches.tolist(), counts.tolist(), strict=True):
            _change(self.stretches, stretch, sign * count)

    def lowest(self) -> int | None:
        """Return an offset of the log below which every message is done, at most 4 MiB too low; None if all are."""
        return min(self.stretches) << STRETCH_BITS if self.stretches else None

    def by_hour(self, begin_ms: int, end_ms: int, subject: int | None) -> dict[int, int]:
        """Return messages per hour, by the ms at which it begins, of the hours that share time with the range."""
        found = {}
        for hour in sorted(self.hours):
            if hour * HOUR_MS < end_ms and begin_ms < (hour + 1) * HOUR_MS:
                subjects = self.hours[hour]
                count = sum(subjects.values()) if subject is None else subjects.get(subject, 0)
                if count:
                    found[hour * HOUR_MS] = count
        return found


def _change(counts: dict[int, int], key: int, by: int) -> None:
    count = counts.get(key, 0) + by
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)
