"""Core. Durable facts of a copy beside its log: its identity, and its newest acknowledged point.

    broker.json    {"crc": CRC-32 of the rest as sorted JSON, "incarnation": made with the data directory, "group": …,
                    "term": …, "boot": …, "complete": whether this copy once had all frames of its master,
                    "assignment": the last one from the metaserver, or null,
                    "promised": lowest term of a mastership it takes part in; 0: no promise,
                    "owner": hostname:serve_port of the broker that the assignment was for,
                    "fills": number of fillings after which this copy became complete,
                    "instance": of the process that the assignment was for: the place of its directory}
    copy.json      {"crc", "life": raised when the log begins anew: an older "own" is of another one, "follows": …,
                    "kept_end": …, "lacks": a point like "own", or null}
    points.json    {"crc": CRC-32 of the rest as sorted JSON, "life": …, "own": [term, boot, end, chain] or null}

A broker fsyncs a newer epoch in broker.json before it acts in it, and refuses every message of an older epoch from then
on. The last assignment lets it start while the metaserver is down.

The acknowledged point is the newest point up to which this copy has acknowledged messages as master, or was notified of
it by its master. It is stored outside the log, because a log alone cannot show that its disk was restored to an older
state. The other copies store their own points, and the metaserver's row has one per copy. A log that lacks a stored
point *was rolled back*: its copy reports it, is no master before it is refilled, and makes no other copy cut (I25).

The first two files are written before their facts are used. The last is written on a thread, at most `SAVE_MS` after
the point changed, and when a mastership or the process ends. So a commit costs no further fsync (decision 20 lists
uncovered cases).

Keeps I16.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from qmq.crc import decode_checked, encode_checked, of_known_fields
from qmq.errors import CorruptFrame, require
from qmq.log import MessageLog
from qmq.log.disk import Disk
from qmq.types import Epoch

log = logging.getLogger(__name__)

NAME = "broker.json"
POINTS, COPY = "points.json", "copy.json"
SAVE_MS = 500
"""Maximum age of the file's `own`: two fsyncs of a small file each half second under load, on a thread."""


class Point(NamedTuple):
    """Acknowledged point: in `epoch`, all before `end` was acknowledged, and the chain there was `chain`."""

    epoch: Epoch
    end: int
    chain: int

    def __str__(self) -> str:
        return f"offset {self.end} (epoch {self.epoch}, chain {self.chain:016x})"

    def to_list(self) -> list[int]:
        return [*self.epoch, self.end, self.chain]

    @classmethod
    def from_list(cls, numbers: list[int]) -> Point:
        """Parse a point; raises ValueError or TypeError."""
        term, boot, end, chain = (_number(number) for number in numbers)
        return cls(Epoch(term, boot), end, chain)


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is no number of 64 bits without sign")
    return value


def log_lacking(message_log: MessageLog, group: str, point: Point, source: str) -> None:
    """Log that a copy lacks an acknowledged point. Behind damage the frames may be whole, as the repair will show."""
    text = "%s group=%s end=%d: this disk lacks acknowledged frames up to %s, according to %s"
    if is_behind_damage(message_log, point):
        log.error(text, "log damaged", group, message_log.end, point, source)
    else:
        log.critical(text, "rolled back", group, message_log.end, point, source)


def is_behind_damage(message_log: MessageLog, point: Point) -> bool:
    """Return whether damage lies before a point. Then the frames up to the point may be whole, and the log was not
    rolled back.
    """
    return message_log.damage is not None and message_log.damage.begin < point.end


def is_lacking(message_log: MessageLog, point: Point) -> bool:
    """Return whether a log ends before a point, or has another history there. Damage there is not another history."""
    if point.end <= message_log.start:
        return False  # retention deleted it, so nothing shows that it was missing
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
    """Durable facts of a copy about its own log."""

    life: int = 0
    follows: bool = False
    """Whether the last frames came from a master that this copy followed, so it confirmed them."""
    kept_end: int = 0
    """Offset where this copy's first mastership since it last followed began. Frames before it were confirmed."""
    lacks: Point | None = None
    """Acknowledged point that this copy's log lacks."""


class PointFile:
    """Points of one copy, and their files. Made with the identity; changed on its loop only."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._copy = _decode_copy(_read(disk, COPY))
        self.own = _decode_own(_read(disk, POINTS), self._copy.life)
        """Newest acknowledged point at this copy."""
        self._saved = self.own
        self._is_saving = False
        self._saved_ms = 0

    @property
    def lacks(self) -> Point | None:
        return self._copy.lacks

    def keeps(self, message_log: MessageLog, *, restored_from: int | None = None) -> int:
        """Return the offset before which this copy keeps everything: all frames that it confirmed, or that are below
        its acknowledged point. It wrote later frames as master, and no other copy is known to have confirmed them.

        Args:
            restored_from: offset behind which frames came from slaves, which keep them; this copy did not confirm them.
        """
        followed_end = message_log.end if restored_from is None else restored_from
        own_end = self.own.end if self.own else 0
        kept_end = followed_end if self._copy.follows else self._copy.kept_end
        return min(max(kept_end, own_end, message_log.state.high_watermark), message_log.end)

    def high_watermark(self, message_log: MessageLog) -> int:
        """Return the offset below which this copy has the frames up to its acknowledged point.

        Frames may state a watermark beyond this disk's frames, because they came from a master further ahead. The last
        frames of a quiet log state an older watermark than the point.
        """
        stated = min(message_log.state.high_watermark, message_log.flushed_end)
        point = self.own
        if point is not None and stated < point.end <= message_log.flushed_end:
            return point.end if message_log.chain_is(point.end, point.chain) else stated
        return stated

    def acknowledged(self, point: Point) -> None:
        """Record a newer point; it is saved soon."""
        if self.own is None or (point.epoch, point.end) > (self.own.epoch, self.own.end):
            self.own = point

    def following(self) -> None:
        """Record that this copy confirms a master's frames from here on. Durable on return, as all below."""
        self._put(follows=True)

    def seeding(self) -> None:
        """Record that this copy's log began anew, so facts about the old log do not hold."""
        self.own = None
        self._put(life=self._copy.life + 1, follows=True, kept_end=0, lacks=None)

    def beginning(self, end: int) -> None:
        """Record that this copy writes as master from `end` on.

        Frames that a crash took from the log before their fsync are not kept: this copy never confirmed them.
        """
        self._put(follows=False, kept_end=end if self._copy.follows else min(self._copy.kept_end, end))

    def rolled_back(self, lacks: Point) -> None:
        """Record an acknowledged point that this copy's log lacks."""
        if self.lacks is None or lacks.end > self.lacks.end:
            self._put(lacks=lacks)

    def refilled(self) -> None:
        self._put(lacks=None)

    def forget(self) -> None:
        """Forget the missing point: an operator accepted the loss."""
        self.own = None
        self._put(life=self._copy.life + 1, lacks=None)

    @property
    def is_newer_than_saved(self) -> bool:
        return self._is_saving or self.own != self._saved

    def save(self) -> None:
        """Write the newest point. While a thread still writes an older point, the newest becomes due when that write
        ends.
        """
        if self._is_saving:
            self._saved_ms -= SAVE_MS
        elif self.own != self._saved:
            self._job()()
            self._saved = self.own

    def due(self, now_ms: int) -> Callable[[], None] | None:
        """Return the job to run on a thread now, or None; call `saved` afterwards."""
        if self._is_saving or self.own == self._saved or now_ms - self._saved_ms < SAVE_MS:
            return None
        self._is_saving = True
        self._saved = self.own
        self._saved_ms = now_ms
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
    """Return the fields of a file; none if it is missing or damaged. Other copies still have their points."""
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


@dataclass(frozen=True, slots=True)
class Identity:
    incarnation: str
    group: str = ""
    term: int = 0
    boot: int = 0
    complete: bool = False
    assignment: dict[str, Any] | None = None
    owner: str = ""
    promised: int = 0
    fills: int = 0
    instance: str = ""

    @property
    def epoch(self) -> Epoch:
        """Newest epoch known."""
        return Epoch(self.term, self.boot)

    @property
    def known_term(self) -> int:
        """Newest term known. Until the master's first frame, the last assignment has a newer term than the epoch."""
        return max(self.term, self.assignment["term"] if self.assignment else 0)

    @property
    def fill_id(self) -> str:
        """Id of this copy's present or next filling; see `qmq.replication.assignment`."""
        return f"{self.incarnation}/{self.fills}"


class IdentityFile:
    """The identity and its file. Made by main; the only writer."""

    def __init__(self, disk: Disk, *, new_incarnation: str, instance: str = "") -> None:
        """Raises CorruptFrame if the file is damaged: move this data directory aside and let the broker be seeded.

        Args:
            instance: id of this directory at its place (`qmq.log.disk`); a copy of the directory has another id.
        """
        self._disk = disk
        self.instance = instance
        self.points = PointFile(disk)
        self.value = Identity(new_incarnation)
        if data := disk.read(NAME, 0, disk.size(NAME)):
            self.value = _decode(data)
        else:
            self._put()

    def learn(self, epoch: Epoch) -> None:
        """Make a newer epoch durable. Does nothing for the epoch already known."""
        if epoch != self.value.epoch:
            require(epoch > self.value.epoch, "I2: epochs only grow")
            self._change(term=epoch.term, boot=epoch.boot)

    def next_boot(self, term: int, *, above: int = 0) -> Epoch:
        """Return, durably, the epoch of a new mastership in `term`. Its boot was never used before and is above
        `above`.
        """
        boot = max(self.value.boot if term == self.value.term else 0, above) + 1
        self.learn(Epoch(term, boot))
        return Epoch(term, boot)

    def promise(self, term: int) -> None:
        """Store the promise to follow no master of an older term than `term`, and to be none."""
        if term > self.value.promised:
            self._change(promised=term)

    def completed(self, complete: bool) -> None:
        if complete != self.value.complete:
            self._change(complete=complete, fills=self.value.fills + complete)

    def assigned(self, group: str, assignment: dict[str, Any], owner: str) -> None:
        part = {"group": group, "assignment": assignment, "owner": owner, "instance": self.instance}
        if any(getattr(self.value, name) != value for name, value in part.items()):
            self._change(**part)

    def _change(self, **fields: Any) -> None:
        self.value = replace(self.value, **fields)
        self._put()

    def _put(self) -> None:
        self._disk.put(NAME, encode_checked(asdict(self.value), indent=1))


def _decode(data: bytes) -> Identity:
    try:
        return of_known_fields(Identity, decode_checked(data))
    except (ValueError, TypeError) as error:
        raise CorruptFrame(0, f"{NAME} is damaged: {error}") from None
