"""Core. Read a piece of all copies of a log at once: one is parsed and judged, the others are held against its bytes.

The same bytes say the same. So a copy that has, at each place, the bytes that the first one gave for it needs no
judging of its own; only where a copy has other ones, or less, is it walked by itself. Bytes are compared, not hashes:
nothing could be equal by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qmq.audit.facts import Gathering, PieceFacts
from qmq.audit.line import FOREVER_MS
from qmq.audit.walk import WINDOW_BYTES, Storage, Walk

ALL = ""
"""In place of a copy's name: what is said is true of all of them."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Where the log of a copy begins and ends; `chain` is the chain before `start`, if anything tells."""

    start: int
    end: int
    chain: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How the pieces of one broker group are read. Copies in order: the first one that is there is judged for all."""

    logs: Mapping[str, LogRange]
    until_ms: int = FOREVER_MS
    begin: int = 0
    """What lies before was judged by an earlier run: what may be stored once is not looked for there."""

    def read(self, copies: Mapping[str, Storage], begin: int, end: int) -> dict[str, PieceFacts]:
        """Return what the frames that begin in `[begin, end)` say: one entry, ALL, if all copies have the same bytes,
        else one per copy."""
        first, *others = copies
        walk = self._walk(first, copies[first], begin, end)
        unread = walk.enter()
        alike = {} if unread else {name: self._beside(name, copies, walk, begin, end) for name in others}
        same = {name: other for name, other in alike.items() if other is not None}
        facts, at = Gathering(self.until_ms, wants_stored=begin >= self.begin), walk.at
        for window in [*unread]:
            facts.take(window)
        for window in walk.windows():
            facts.take(window)
            size = len(window.data)
            is_next = bool(size) and window.offset == at
            same = {name: one for name, one in same.items() if is_next and one.holds(at, window.data)}
            at = window.offset + size
        if at != walk.at:
            same = {}
        said = facts.facts()
        if len(same) == len(others):
            return {ALL: said}
        found = {first: said}
        for name in others:
            found[name] = said if name in same else self._alone(name, copies[name], begin, end)
        return found

    def _walk(self, name: str, copy: Storage, begin: int, end: int) -> Walk:
        log = self.logs[name]
        is_start = begin == log.start
        until = max(begin, min(end, log.end))
        return Walk(copy, begin, until, chain=log.chain if is_start else None, is_start=is_start)

    def _beside(self, name: str, copies: Mapping[str, Storage], first: Walk, begin: int, end: int) -> _Beside | None:
        """Return a reader of what another copy has where `first` reads; None if it begins or ends elsewhere."""
        ours = self.logs[next(iter(copies))]
        if min(end, ours.end) != min(end, self.logs[name].end):
            return None
        walk = self._walk(name, copies[name], begin, end)
        if walk.enter() or walk.at != first.at:
            return None
        return _Beside(copies[name], walk.at, walk.ahead)

    def _alone(self, name: str, copy: Storage, begin: int, end: int) -> PieceFacts:
        facts = Gathering(self.until_ms)
        for window in self._walk(name, copy, begin, end).windows():
            facts.take(window)
        return facts.facts()


class _Beside:
    """Bytes of another copy, asked for in order."""

    def __init__(self, copy: Storage, at: int, ahead: bytes) -> None:
        self._copy, self._at, self._left = copy, at, memoryview(ahead)

    def holds(self, offset: int, data: memoryview) -> bool:
        """Return whether the copy has `data` at `offset`. What it gave beyond that is kept for the next time."""
        if offset != self._at:
            self._left = memoryview(b"")
        at = 0
        while at < len(data):
            try:
                found = self._left or memoryview(self._copy.window(offset + at, min(WINDOW_BYTES, len(data) - at)))
            except OSError:
                return False
            part = min(len(found), len(data) - at)
            if not part or not _is_same(found[:part], data[at : at + part]):
                return False
            at, self._left = at + part, found[part:]
        self._at = offset + at
        return True


def _is_same(one: memoryview, other: memoryview) -> bool:
    """Return whether as many bytes are the same: memoryviews are compared byte by byte, which is slow."""
    whole = len(one) // 8 * 8
    if one[whole:] != other[whole:]:
        return False
    return np.array_equal(np.frombuffer(one[:whole], np.uint64), np.frombuffer(other[:whole], np.uint64))
