"""Core. Frame-by-frame comparison of two copies, piece by piece, in the order of offsets.

Two frames are the same, wherever they stand, if their headers agree in all fields but high watermark, epoch and chain.
A batch may also have other sequences: an extra batch in one copy changes those of all later batches of its subject.
Frames moved by one distance are one finding, and so are neighbours that one copy lacks. Frames below and above the high
watermark are kept apart. Frames missing within a damaged range are not reported again. A frame is `reordered` if the
other copy has its messages elsewhere.

Frames that are equal in both copies leave only their messages in memory. After `UNLIKE_MAX` other frames the comparison
ends, and one finding covers the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qmq.audit.findings import COPIES, FINDINGS_MAX, MASTER, SLAVE, FindingKind, Row, finding_row
from qmq.log.frame import Frame

SHIFTED_FRAMES_MIN, SHIFTS_MAX = 3, 5
"""At least so many frames moved by one distance are a shift, for the most frequent distances. Other moved frames are
reported one by one.
"""
UNLIKE_MAX = 200_000
"""Frames of both copies that are kept because they differ: 200 MB."""
STAYING_MAX = 1_000_000
"""Equal frames in differing pieces, of which only the place of their messages is kept: 150 MB."""
ALIKE_MAX = 16
"""Places of one frame from which distances are counted: thousands of empty pulls may be equal."""
_NO_FIELDS = frozenset({"offset", "chain", "body_at", "epoch"})
_COMPARED = [name for name in Frame._fields if name not in _NO_FIELDS]


Stored = tuple[str, int, int]
"""Subject, first sequence and count: messages, wherever they stand."""


class Copied(NamedTuple):
    """A frame of one copy; `body` is a hash, or None if the body is damaged."""

    frame: Frame
    body: bytes | None

    @property
    def messages(self) -> Stored:
        return self.frame.subject, self.frame.first_sequence, self.frame.count

    @property
    def same(self) -> tuple[Any, ...]:
        """Return the fields that stay equal when a frame moves."""
        frame = self.frame
        about = frame.kind, frame.flags, frame.timestamp_ms, frame.producer, frame.batch
        first = None if frame.producer else frame.first_sequence
        return frame.subject, first, frame.count, *about, frame.body_crc, frame.body_bytes


Side = dict[int, Copied]
"""Frames by offset, ascending."""


class Differences(NamedTuple):
    """Rows of FINDINGS and `frames`, the number of frames in the finding; `more`: kinds of findings not listed."""

    rows: list[Row]
    more: Counter[str]


class Comparison:
    """Comparison of master and slave, fed with one piece of both copies after the other.

    `damaged`: (copy, begin, end) of damaged ranges.
    """

    def __init__(self, watermark: int, damaged: Iterable[tuple[str, int, int]] = ()) -> None:
        self._watermark = watermark
        self._damaged = [*damaged]
        self._sides: dict[str, Side] = {name: {} for name in COPIES}
        self._staying: set[Stored] = set()
        """Messages of frames that both copies have in one place."""
        self._cut: int | None = None

    @property
    def is_full(self) -> bool:
        return self._cut is not None

    def take(self, end: int, master: Iterable[Copied], slave: Iterable[Copied]) -> None:
        """Take the frames of both copies in the piece that ends at `end`."""
        ours, theirs = ({copied.frame.offset: copied for copied in side} for side in (master, slave))
        for offset in [offset for offset, copied in ours.items() if theirs.get(offset) == copied]:
            staying = ours.pop(offset).messages
            del theirs[offset]
            if staying[2]:
                self._staying.add(staying)
        self._sides[MASTER] |= ours
        self._sides[SLAVE] |= theirs
        if sum(map(len, self._sides.values())) > UNLIKE_MAX or len(self._staying) > STAYING_MAX:
            self._cut = end

    def finish(self, rest: Sequence[tuple[int, int]] = ()) -> Differences:
        """Return the findings; `rest`: pieces left out because the comparison is full."""
        shifts, sides = self._split_shifted()
        if self._cut is not None:  # frames near the cut may be a distance behind it in the other copy
            reach = self._cut - max((abs(by) for by in shifts), default=0)
            sides = {name: {at: c for at, c in side.items() if at < reach} for name, side in sides.items()}
        listed = _Listing(self._watermark)
        for by, pairs in sorted(shifts.items()):
            listed.add(_shift(by, pairs), len(pairs))
        stored = {
            name: {copied.messages for copied in side.values() if copied.frame.count} for name, side in sides.items()
        }
        for has, lacks, what in ((MASTER, SLAVE, FindingKind.MISSING), (SLAVE, MASTER, FindingKind.EXTRA)):
            alone = (copied for at, copied in sides[has].items() if at not in sides[lacks])
            hurt = [(begin, end) for copy, begin, end in self._damaged if copy == lacks]
            for run in self._runs(alone, hurt, stored[lacks], what):
                listed.add(_alone(run, lacks), len(run.of))
        for offset, ours in sides[MASTER].items():
            if (theirs := sides[SLAVE].get(offset)) is not None:
                self._pair(ours, theirs, stored[SLAVE], listed)
        if rest:
            listed.add(_uncompared(rest), 1)
        return listed.differences()

    def _split_shifted(self) -> tuple[dict[int, list[_Moved]], dict[str, Side]]:
        """Return the master's moved frames by distance, and the other frames of each copy."""
        places: dict[str, defaultdict[tuple[Any, ...], list[int]]] = {name: defaultdict(list) for name in COPIES}
        for name, other in ((MASTER, SLAVE), (SLAVE, MASTER)):
            for offset, copied in self._sides[name].items():
                there = self._sides[other].get(offset)
                if there is None or there.same != copied.same:
                    places[name][copied.same].append(offset)
        by_distance = _distances(places[MASTER], places[SLAVE])
        shifts: dict[int, list[_Moved]] = defaultdict(list)
        gone: dict[str, set[int]] = {name: set() for name in COPIES}
        for key, offsets in places[MASTER].items():
            moved_to = set(places[SLAVE].get(key, ()))
            for offset in offsets if moved_to else ():
                by = next((by for by in by_distance if offset + by in moved_to), None)
                if by is not None:
                    theirs = self._sides[SLAVE][offset + by]
                    shifts[by].append(_Moved(self._sides[MASTER][offset].frame, theirs.frame.first_sequence))
                    gone[MASTER].add(offset)
                    gone[SLAVE].add(offset + by)
        left = {
            name: {offset: copied for offset, copied in side.items() if offset not in gone[name]}
            for name, side in self._sides.items()
        }
        return shifts, left

    def _runs(
        self,
        alone: Iterable[Copied],
        damaged: list[tuple[int, int]],
        elsewhere: set[Stored],
        what: FindingKind,
    ) -> Iterator[_Run]:
        """Yield neighbouring frames that the other copy lacks."""
        runs: dict[tuple[FindingKind, bool], _Run] = {}
        for copied in alone:
            frame = copied.frame
            if any(begin <= frame.offset < end for begin, end in damaged):
                continue
            is_elsewhere = copied.messages in elsewhere or copied.messages in self._staying
            kind = FindingKind.REORDERED if is_elsewhere else what
            key = kind, frame.offset < self._watermark
            run = runs.get(key)
            if run is not None and run.of[-1].end != frame.offset:
                yield runs.pop(key)
                run = None
            if run is None:
                run = runs[key] = _Run(kind, [])
            run.of.append(frame)
        yield from runs.values()

    def _pair(self, ours: Copied, theirs: Copied, moved: set[Stored], listed: _Listing) -> None:
        """Compare two frames at one offset."""
        differing = _differing(ours, theirs)
        if not differing:
            if ours.frame.chain != theirs.frame.chain:
                listed.add(_row(FindingKind.HISTORY, ours.frame, "only the chain differs"), 1)
            return
        is_other = ours.messages[:2] != theirs.messages[:2]
        is_moved = ours.messages in moved or ours.messages in self._staying
        what = FindingKind.REORDERED if is_other and is_moved else FindingKind.DIFFERENT
        listed.add(_row(what, ours.frame, f"the copies differ in {', '.join(differing)}"), 1)


class _Moved(NamedTuple):
    """The master's frame, and the first sequence of the slave's."""

    frame: Frame
    sequence: int


class _Run(NamedTuple):
    """Neighbouring frames that one copy lacks."""

    what: FindingKind
    of: list[Frame]


class _Listing:
    """Findings of one pair. Below the high watermark, the first of a kind are listed; above it, a kind is one row."""

    def __init__(self, watermark: int) -> None:
        self._watermark = watermark
        self._rows: list[Row] = []
        self._listed: Counter[str] = Counter()
        self._joined: dict[tuple[str, bool], Row] = {}
        self._more: Counter[str] = Counter()

    def add(self, row: Row, frames: int) -> None:
        if row["offset"] >= self._watermark or row["what"] == FindingKind.HISTORY:
            self._join(row, frames)
            return
        self._listed[row["what"]] += 1
        if self._listed[row["what"]] <= FINDINGS_MAX:
            self._rows.append(row | {"frames": frames})
        else:
            self._more[row["what"]] += 1

    def _join(self, row: Row, frames: int) -> None:
        """Join a row to the first one of its kind: its frames only follow a difference, or were not acknowledged."""
        first = self._joined.setdefault((row["what"], row["offset"] < self._watermark), row | {"frames": 0})
        first["frames"] += frames

    def differences(self) -> Differences:
        return Differences(self._rows + list(self._joined.values()), self._more)


def _distances(master: Mapping[Any, list[int]], slave: Mapping[Any, list[int]]) -> list[int]:
    """Return the distances by which enough frames are moved, the most frequent first."""
    often: Counter[int] = Counter()
    for key, offsets in master.items():
        if there := slave.get(key):
            for offset in offsets[:ALIKE_MAX]:
                near = bisect_left(there, offset)
                often.update(place - offset for place in there[max(0, near - ALIKE_MAX) : near + ALIKE_MAX])
    of = sorted((-times, by) for by, times in often.items() if by and times >= SHIFTED_FRAMES_MIN)
    return [by for _, by in of[:SHIFTS_MAX]]


def _differing(ours: Copied, theirs: Copied) -> list[str]:
    """Return the names of the fields in which two frames at one offset differ."""
    names = [name for name in _COMPARED if getattr(ours.frame, name) != getattr(theirs.frame, name)]
    names += [name for name in ("term", "boot") if getattr(ours.frame.epoch, name) != getattr(theirs.frame.epoch, name)]
    bodies = ours.body, theirs.body
    if ours.frame.body_crc == theirs.frame.body_crc and None not in bodies and ours.body != theirs.body:
        names.append("body")  # of one CRC, so headers and chains are equal
    return names


def _row(what: FindingKind, frame: Frame, text: str, *, end: int | None = None) -> Row:
    return finding_row(
        what,
        copy=SLAVE,
        offset=frame.offset,
        end=frame.end if end is None else end,
        subject=frame.subject,
        sequence=frame.first_sequence,
        text=text,
    )


def _shift(by: int, moved: list[_Moved]) -> Row:
    frames = [frame for frame, _ in moved]
    where = "on" if by > 0 else "back"
    text = f"{len(frames)} frames with {sum(frame.count for frame in frames)} messages"
    first = min(frames, key=lambda frame: frame.offset)
    text = f"{text} stand {abs(by)} bytes further {where} in the slave"
    if others := sum(frame.first_sequence != sequence for frame, sequence in moved):
        text += f"; {others} of them have other sequences there"
    return _row(FindingKind.SHIFTED, first, text, end=max(frame.end for frame in frames))


def _alone(run: _Run, lacking: str) -> Row:
    messages = sum(frame.count for frame in run.of)
    text = f"{len(run.of)} frames with {messages} messages; the {lacking} lacks them"
    return _row(run.what, run.of[0], text, end=run.of[-1].end)


def _uncompared(rest: Sequence[tuple[int, int]]) -> Row:
    text = f"the copies differ in {len(rest)} more pieces, which are not compared frame by frame"
    return finding_row(FindingKind.DIFFERENT, copy=SLAVE, offset=rest[0][0], end=rest[-1][1], text=text)
