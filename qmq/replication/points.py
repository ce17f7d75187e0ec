"""Core. The acknowledged point, remembered outside the log: nobody can tell from a disk alone that it was put back.

Each copy keeps, in a file beside its log, the newest point up to which it knows that messages were acknowledged; the
other copy has its own such memory, and the metaserver's row one per copy. A log that lacks a point that somebody
remembers *was rolled back*: this copy says so, is no master before it is refilled, and makes nobody cut (I25).

    points.json    {"crc": CRC-32 of the rest as sorted JSON, "life": …, "own": [term, boot, end, chain] or null}
    copy.json      {"crc", "life": raised when the log begins anew: an older "own" is of another one, "follows": …,
                    "kept_end": …, "lacks": a point like "own", or null}

The first is written at most `SAVE_MS` after the point changed, on a thread, and when a mastership or the process ends;
the second before it is used. So a commit costs no fsync more (decision 20 says what remains uncovered).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from qmq.crc import decode_checked, encode_checked
from qmq.errors import CorruptFrame
from qmq.log import MessageLog
from qmq.log.disk import Disk
from qmq.types import Epoch

log = logging.getLogger(__name__)

POINTS, COPY = "points.json", "copy.json"
SAVE_MS = 500
"""How old the file's `own` may be: two fsyncs of a small file each half second while messages come, on a thread."""


class Point(NamedTuple):
    """In `epoch`, all before `end` was acknowledged, and the chain there was `chain`."""

    epoch: Epoch
    end: int
    chain: int

    def __str__(self) -> str:
        return f"offset {self.end} (epoch {self.epoch}, chain {self.chain:016x})"

    def to_list(self) -> list[int]:
        return [*self.epoch, self.end, self.chain]

    @classmethod
    def from_list(cls, numbers: list[int]) -> Point:
        """Raises ValueError or TypeError."""
        term, boot, end, chain = (_number(number) for number in numbers)
        return cls(Epoch(term, boot), end, chain)


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is no number of 64 bits without sign")
    return value


def is_lacking(message_log: MessageLog, point: Point) -> bool:
    """Return whether a log ends before a point, or has another history there. Damage there is not another history."""
    if point.end <= message_log.start:
        return False  # retention went on; nobody can tell any more
    if point.end > message_log.end:
        return True
    if message_log.chain_is(point.end, point.chain):
        return False
    try:
        message_log.stored.check_readable(point.end)
    except CorruptFrame:
        return False
    return True


@dataclass(frozen=True, slots=True)
class CopyState:
    """What a copy must know about its own log, durably."""

    life: int = 0
    follows: bool = False
    """Whether this copy's last frames came from a master that it followed: it confirmed them."""
    kept_end: int = 0
    """Where this copy's mastership began the last time after it had followed: what stands before it was confirmed."""
    lacks: Point | None = None
    """Acknowledged, and not in our log."""


class PointFile:
    """What one copy remembers, and its files. Made with the identity; changed on its loop only."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._copy = _decode_copy(_read(disk, COPY))
        self.own = _decode_own(_read(disk, POINTS), self._copy.life)
        """The newest acknowledged point this copy knows."""
        self._saved, self._is_saving, self._saved_ms = self.own, False, 0

    @property
    def lacks(self) -> Point | None:
        return self._copy.lacks

    def keeps(self, message_log: MessageLog, *, restored_from: int | None = None) -> int:
        """Return the offset before which this copy gives up nothing: it was confirmed here, or is known to be
        acknowledged. Behind it stands what this copy wrote as master, and nobody else confirmed as far as we know.

        Args:
            restored_from: what stands behind it came from slaves, who keep it; this copy confirmed it to nobody.
        """
        followed_end = message_log.end if restored_from is None else restored_from
        own_end = self.own.end if self.own else 0
        kept_end = followed_end if self._copy.follows else self._copy.kept_end
        return min(max(kept_end, own_end, message_log.state.high_watermark), message_log.end)

    def high_watermark(self, message_log: MessageLog) -> int:
        """Return the offset below which this copy has what it knows to be acknowledged.

        Frames may state more than our own disk has: they came from a master that was ahead of us. The last ones of a
        quiet log state an older one than the point.
        """
        stated = min(message_log.state.high_watermark, message_log.flushed_end)
        point = self.own
        if point is not None and stated < point.end <= message_log.flushed_end:
            return point.end if message_log.chain_is(point.end, point.chain) else stated
        return stated

    def acknowledged(self, point: Point) -> None:
        """Take note of a newer point; it is saved soon."""
        if self.own is None or (point.epoch, point.end) > (self.own.epoch, self.own.end):
            self.own = point

    def following(self) -> None:
        """From here on, this copy confirms what a master sends. Durable on return, as all that follows here."""
        self._put(follows=True)

    def seeding(self) -> None:
        """This copy's log has begun anew: what was known of the old one is not in it."""
        self.own = None
        self._put(life=self._copy.life + 1, follows=True, kept_end=0, lacks=None)

    def beginning(self, end: int) -> None:
        """From `end` on, this copy writes as master.

        What a crash took from the log before its fsync is not kept: nobody got a confirmation of it from here.
        """
        self._put(follows=False, kept_end=end if self._copy.follows else min(self._copy.kept_end, end))

    def rolled_back(self, lacks: Point) -> None:
        """This copy's log lacks an acknowledged point."""
        if self.lacks is None or lacks.end > self.lacks.end:
            self._put(lacks=lacks)

    def refilled(self) -> None:
        self._put(lacks=None)

    def forget(self) -> None:
        """An operator accepted that what this copy lacks is gone."""
        self.own = None
        self._put(life=self._copy.life + 1, lacks=None)

    @property
    def is_newer_than_saved(self) -> bool:
        return self._is_saving or self.own != self._saved

    def save(self) -> None:
        """Write the newest point. While a thread still writes the one before, it is due as soon as that has ended."""
        if self._is_saving:
            self._saved_ms -= SAVE_MS
        elif self.own != self._saved:
            self._job()()
            self._saved = self.own

    def due(self, now_ms: int) -> Callable[[], None] | None:
        """Return what is to be run on a thread now, if anything; then tell `saved`."""
        if self._is_saving or self.own == self._saved or now_ms - self._saved_ms < SAVE_MS:
            return None
        self._is_saving, self._saved, self._saved_ms = True, self.own, now_ms
        return self._job()

    def saved(self) -> None:
        self._is_saving = False

    def _job(self) -> Callable[[], None]:
        data = encode_checked({"life": self._copy.life, "own": self.own and self.own.to_list()}, indent=1)
        return partial(self._disk.put, POINTS, data)

    def _put(self, **fields: Any) -> None:
        before, self._copy = self._copy, replace(self._copy, **fields)
        if self._copy != before:
            copy = self._copy
            lacks = copy.lacks and copy.lacks.to_list()
            fields = {"life": copy.life, "follows": copy.follows, "kept_end": copy.kept_end, "lacks": lacks}
            self._disk.put(COPY, encode_checked(fields, indent=1))


def _read(disk: Disk, name: str) -> dict[str, Any]:
    """A file that is damaged, or not there, is a memory that was lost; the others remain."""
    data = disk.read(name, 0, disk.size(name))
    try:
        return decode_checked(data) if data else {}
    except ValueError as error:
        log.error("%s is damaged and not used: %s", name, error)
        return {}


def _decode_copy(fields: dict[str, Any]) -> CopyState:
    if not fields:
        return CopyState()
    lacks = Point.from_list(fields["lacks"]) if fields["lacks"] else None
    return CopyState(fields["life"], fields["follows"], fields["kept_end"], lacks)


def _decode_own(fields: dict[str, Any], life: int) -> Point | None:
    return Point.from_list(fields["own"]) if fields and fields["own"] and fields["life"] == life else None
