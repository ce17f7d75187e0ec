"""Shell. Second reading of both copies where they differ: frame by frame to compare them, and once per finding.

One task compares one pair of copies. The reading of a finding's place adds byte, message, epoch, segment and host, and
shows whether a broker has repaired it since.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from hashlib import blake2b

from qmq.audit.comparison import Comparison, Copied, Differences
from qmq.audit.copies import CannotRead, Copy, Description, open_copy
from qmq.audit.facts import LogRange
from qmq.audit.findings import BOTH, COPIES, DERIVED, MASTER, SLAVE, FindingKind, Row
from qmq.audit.walk import HEADER_BYTES_MAX, Walk, Window
from qmq.codec import batch_ends, decode_envelope, labels_bytes
from qmq.errors import QmqError
from qmq.log.frame import FLAG_LABELLED, Frame, FrameKind
from qmq.message_sizes import FRAME_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Pair:
    """Two copies that differ in some `pieces`: places and logs, by the names of COPIES.

    `damaged`: (name, begin, end) of damaged ranges, where missing frames are not reported again.
    """

    places: Mapping[str, Mapping[str, str]]
    logs: Mapping[str, LogRange]
    pieces: Sequence[tuple[int, int]]
    watermark: int
    damaged: Sequence[tuple[str, int, int]]


def compare_pair(pair: Pair) -> Differences:
    """Compare the two copies in the pair's pieces; raise CannotRead."""
    comparison = Comparison(pair.watermark, pair.damaged)
    pieces = [*pair.pieces]
    with ExitStack() as stack:
        copies = {side: stack.enter_context(closing(open_copy(pair.places[side]))) for side in COPIES}
        while pieces and not comparison.is_full:
            begin, end = pieces.pop(0)
            comparison.take(end, *(_copied(copies[side], pair.logs[side], begin, end) for side in COPIES))
    return comparison.finish(pieces)


def _copied(copy: Copy, log: LogRange, begin: int, end: int) -> Iterator[Copied]:
    """Yield the frames of one copy that begin in a piece."""
    is_start, until = begin == log.start, max(begin, min(end, log.end))
    copy.read_until(until)
    for window in Walk(copy, begin, until, chain=log.chain if is_start else None, is_start=is_start).windows():
        for frame in window.frames:
            is_whole = frame.offset not in window.damaged
            yield Copied(frame, blake2b(window.body(frame), digest_size=16).digest() if is_whole else None)


_OF_FRAMES = frozenset(
    {FindingKind.DIFFERENT, FindingKind.MISSING, FindingKind.EXTRA, FindingKind.SHIFTED, FindingKind.HISTORY}
)
"""Kinds that take `sequence` from the frame's header; only frames of messages have one."""
NAMED_MAX = 200
"""Findings for which both copies are read again."""
COMPARED_BYTES_MAX = FRAME_BYTES_MAX + HEADER_BYTES_MAX
"""Bytes compared of a damaged range, which may be a whole segment."""
BLOCK_BYTES = 1 << 16
_COMPARED = frozenset({FindingKind.DIFFERENT, FindingKind.DAMAGED, FindingKind.CHAIN, FindingKind.REORDERED})
_BY_PLACE = frozenset({FindingKind.BATCH_TWICE, FindingKind.ID_TWICE})
"""Kinds with the message's index in its frame as `sequence`, until it is read here."""


def describe_findings(
    group: str, places: Mapping[str, dict[str, str]], logs: Mapping[str, Description], findings: list[Row]
) -> None:
    """Sort the findings, and add facts from the logs: host, segment, epoch, byte, subject, sequence, id."""
    findings.sort(key=lambda row: (row["offset"] is None, row["offset"] or 0, row["what"], row["copy"]))
    for row in findings:
        names = tuple(places) if row["copy"] == BOTH else (row["copy"],)
        row["group"] = group
        row["host"] = ", ".join(place.get("broker") or place["path"] for name in names if (place := places.get(name)))
        row["segment"] = _segment(logs.get(names[0]), row["offset"])
        row["epoch"] = row["byte"] = None
    with ExitStack() as stack:
        copies = {name: stack.enter_context(closing(open_copy(place))) for name, place in places.items()}
        of_frames = [row for row in findings if row["offset"] is not None and row["what"] not in DERIVED]
        for row in of_frames[:NAMED_MAX]:
            other = SLAVE if row["copy"] in (MASTER, BOTH) else row["copy"]
            _FindingPlace({MASTER: copies[MASTER], SLAVE: copies[other]}, row).name()


def _segment(log: Description | None, offset: int | None) -> int | None:
    if log is None or offset is None or (at := bisect_right(log.segments, offset)) == 0:
        return None
    return log.segments[at - 1]


class _FindingPlace:
    """Place of one finding in the master's copy and the slave's."""

    def __init__(self, copies: Mapping[str, Copy], row: Row) -> None:
        self._copies = copies
        self._row = row
        self._windows = {name: _window(copy, row["offset"]) for name, copy in copies.items()}

    def name(self) -> None:
        row = self._row
        if row["what"] in _COMPARED and row["copy"] != BOTH:
            row["byte"] = self._first_difference()
            if row["byte"] is not None:
                row["text"] += f"; the copies first differ at byte {row['byte']}"
            elif row["what"] == FindingKind.DAMAGED and self._is_repaired():
                row["what"] = FindingKind.REPAIRED
                row["text"] += "; the broker has taken it from the other copy since"
        if row["what"] == FindingKind.UNSENT:
            row["byte"] = row["sequence"]  # a delayed message is identified by its offset
        window = self._whole_window()
        if window is None:
            return
        frame = window.frames[0]
        row["epoch"] = str(frame.epoch)
        row["subject"] = row["subject"] or frame.subject or None
        if frame.kind == FrameKind.MESSAGES:
            self._name_message(window, frame)
        elif row["what"] in _OF_FRAMES:
            row["sequence"] = None

    def _is_repaired(self) -> bool:
        """Return whether both copies now have the same whole frame at the place that was damaged."""
        ours, theirs = (self._windows[name] for name in COPIES)
        return (
            ours is not None
            and theirs is not None
            and not ours.damaged
            and not theirs.damaged
            and bool(ours.frames)
            and ours.frames[:1] == theirs.frames[:1]
        )

    def _whole_window(self) -> Window | None:
        own = {FindingKind.MISSING: MASTER, FindingKind.EXTRA: SLAVE}.get(self._row["what"], self._row["copy"])
        for name in (MASTER, SLAVE) if own in (MASTER, BOTH) else (SLAVE, MASTER):
            window = self._windows[name]
            if window is not None and window.frames and not window.damaged:
                return window
        return None

    def _first_difference(self) -> int | None:
        """Return the offset of the first byte in which the copies differ.

        A difference in the body counts first: a header written for another body differs as well.
        """
        begin = self._row["offset"]
        end = min(self._row["end"] or begin + 1, begin + COMPARED_BYTES_MAX)
        try:
            ours, theirs = (self._copies[name].window(begin, end - begin)[: end - begin] for name in COPIES)
        except (OSError, CannotRead):
            return None
        if ours == theirs or not ours or not theirs:
            return None
        heads = [window.frames[0].body_at for window in self._windows.values() if window and window.frames]
        head = heads[0] if len(heads) == 2 and heads[0] == heads[1] else 0
        if head and (at := _differs(ours[head:], theirs[head:])) is not None:
            return int(begin + head + at)
        at = _differs(ours, theirs)
        return None if at is None else int(begin + at)

    def _name_message(self, window: Window, frame: Frame) -> None:
        row, sequences = self._row, range(frame.first_sequence, frame.first_sequence + frame.count)
        if row["what"] in _BY_PLACE:
            place, row["end"] = row["sequence"], frame.end
        elif row["byte"] is None and row["sequence"] in sequences:
            place = row["sequence"] - frame.first_sequence
        else:
            place = _place_of(window, frame, row["byte"])
        row["sequence"] = frame.first_sequence + place
        with suppress(QmqError, ValueError):  # the problem may be an invalid batch or message
            row["id"] = decode_envelope(_message(window, frame, place)).id


def _window(copy: Copy, offset: int) -> Window | None:
    try:
        return next(Walk(copy, offset, offset + 1, is_start=True).windows(), None)
    except (OSError, CannotRead):
        return None


def _differs(ours: bytes, theirs: bytes) -> int | None:
    """Return the place of the first difference, or None."""
    if ours == theirs:
        return None
    common = min(len(ours), len(theirs))
    blocks = range(0, common, BLOCK_BYTES)
    block = next((at for at in blocks if ours[at : at + BLOCK_BYTES] != theirs[at : at + BLOCK_BYTES]), common)
    return next((at for at in range(block, common) if ours[at] != theirs[at]), common)


def _place_of(window: Window, frame: Frame, byte: int | None) -> int:
    """Return the index of the message that a byte belongs to: by its data, its end offset, or its label.

    A header belongs to all messages; the first one stands for it.
    """
    at = -1 if byte is None else byte - frame.offset - frame.body_at
    if at < 0:
        return 0
    with suppress(QmqError, ValueError):
        ends = batch_ends(window.body(frame), frame.count)
        begin_labels = frame.body_bytes - labels_bytes(frame.count)
        if frame.flags & FLAG_LABELLED and at >= begin_labels:
            return min((at - begin_labels) // 8, frame.count - 1)
        if at < 4 * len(ends):
            return max(0, at // 4 - 1)
        return min(bisect_right(ends, at - 4 * len(ends)) - 1, frame.count - 1)
    return 0


def _message(window: Window, frame: Frame, place: int) -> bytes:
    body = window.body(frame)
    ends = batch_ends(body, frame.count)
    data = 4 * len(ends)
    return bytes(body[data + ends[place] : data + ends[place + 1]])
