"""Core. Facts of one piece of a log, small enough to be sorted together with those of all other pieces.

problems    [{kind: "problem", what (audit.findings), offset, end, text: reason, subject, first: sequence, id}]
more        {kind: number of problems counted but not listed}
piece       {offset of the first frame, end of the last, header of the first, chain at the end, size: offset of the
            last frame, frame_order: state at the end}; None without a frame
epochs      [(term, boot, offset of its first frame in this piece)]
retention   [(offset, end, first offset kept)]
subjects    {subject: (facts by offset, {hours since 1970 UTC: [messages, bytes, first sequence]})}. A fact is one of
  run         offset and end of its frames, first and end sequence; a new one begins after damage
  progress    a pull, ack, nack or position frame: offset, frame: its fields (a plain tuple is pickled faster),
              body, last: end of the subject if known
  tags        offset of a frame, body: messages with tags from there on (audit.messages: TAGGED)
  letter      offset of a dead letter of one of the subject's messages, letter (audit.dead_letters)
delayed     [one decision of a delay server about one message (audit.delays)]
stored      [(offset of a window, its batches, its message ids)], each as audit.messages: STORED

One task reads a piece of all copies. The first copy is parsed and judged; the others are compared with its bytes.
Equal bytes need no second judgement, so only a copy with other or fewer bytes is walked by itself. Bytes are compared,
not hashes, so equality is never by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from qmq.audit import delays
from qmq.audit.dead_letters import DeadLetter
from qmq.audit.findings import HOUR_MS, FindingKind, Row
from qmq.audit.frame_order import FOREVER_MS, FrameOrder
from qmq.audit.headers import TIME_MS_MAX
from qmq.audit.messages import Ints, Messages, decode_error, id_or_none, subjects_of
from qmq.audit.walk import WINDOW_BYTES, Problem, Storage, Walk, Window
from qmq.codec import BATCH_MESSAGES_MAX, check_batch, decode_envelope, split_batch
from qmq.errors import QmqError
from qmq.log.delay_frames import batch_begin
from qmq.log.frame import DELAYS, FLAG_LABELLED, PROGRESS, Frame, FrameKind
from qmq.log.retention import decode_retention
from qmq.message_sizes import FRAME_BYTES_MAX

HOUR_MAX = TIME_MS_MAX // HOUR_MS
NO_JSON = (ValueError, OverflowError, RecursionError)
"""Exceptions for invalid JSON, or for a number in it."""
PROBLEMS_MAX = 1000
"""Problems of one kind listed per piece."""

SubjectFacts = tuple[list[Row], dict[int, list[int]]]


@dataclass(slots=True)
class PieceFacts:
    """Facts of a piece; see the module's docstring. `size`: bytes read; `digest`: combined chains of all frames."""

    size: int = 0
    frames: int = 0
    messages: int = 0
    digest: int = 0
    apart: bool = False
    """Whether another copy has other bytes."""
    problems: list[Row] = field(default_factory=list)
    more: Counter[str] = field(default_factory=Counter)
    piece: Row | None = None
    epochs: list[tuple[int, int, int]] = field(default_factory=list)
    retention: list[tuple[int, int, int]] = field(default_factory=list)
    subjects: dict[str, SubjectFacts] = field(default_factory=dict)
    delayed: list[Row] = field(default_factory=list)
    stored: list[tuple[int, bytes, bytes]] = field(default_factory=list)

    def letters(self) -> list[DeadLetter]:
        """Return the dead letters of the piece."""
        return [fact["letter"] for facts, _ in self.subjects.values() for fact in facts if fact["kind"] == "letter"]


_ALIKE = attrgetter("kind", "epoch")
ALIKE_MIN = 16
"""From this number of frames of one kind and epoch on, numpy is faster than a loop."""


class Gathering:
    """Facts gathered from the windows of a piece, in order. Memory grows with subjects, pulls, acks and message ids."""

    def __init__(self, until_ms: int = FOREVER_MS, *, wants_stored: bool = False) -> None:
        """`until_ms`: upper bound of frames' times. `wants_stored`: also gather batches and ids, for duplicates."""
        self._facts = PieceFacts()
        self._runs: dict[str, Row] = {}
        self._frame_order = FrameOrder(until_ms, begins=True)
        self._wants_stored = wants_stored
        self._listed: Counter[str] = Counter()

    def take(self, window: Window) -> None:
        """Take the next window of the piece."""
        facts = self._facts
        facts.size += len(window.data)
        for problem in window.problems:
            self._problem(problem)
        damage = iter(sorted(p.offset for p in window.problems if p.offset not in window.damaged))
        next_damage = next(damage, None)
        for (kind, _), group in groupby(window.frames, _ALIKE):
            alike, taken = list(group), 0
            if kind == FrameKind.MESSAGES and next_damage is None and len(alike) >= ALIKE_MIN:
                self._frame(alike[0], window)
                taken = len(alike) if self._take_alike(alike[1:]) else 1
            for frame in alike[taken:]:
                while next_damage is not None and next_damage < frame.offset:
                    self._lost()
                    next_damage = next(damage, None)
                self._frame(frame, window)
        if next_damage is not None:
            self._lost()
        batches = [
            frame for frame in window.frames if frame.kind == FrameKind.MESSAGES and frame.offset not in window.damaged
        ]
        if batches:
            self._batches(window, batches)

    def _frame(self, frame: Frame, window: Window) -> None:
        facts, piece = self._facts, self._facts.piece
        if piece is None:
            facts.piece = piece = {"offset": frame.offset, "header": bytes(window.head(frame))}
        piece["end"], piece["chain"], piece["size"] = frame.end, frame.chain, frame.offset
        facts.frames += 1
        facts.digest ^= frame.chain
        if frame.epoch != self._frame_order.last_epoch:
            facts.epochs.append((*frame.epoch, frame.offset))
        for problem in self._frame_order.check(frame):
            self._problem(problem)
        if frame.kind == FrameKind.MESSAGES:
            self._run(frame)
        elif frame.offset in window.damaged:
            return
        elif frame.kind in PROGRESS:
            self._progress(frame, window)
        elif frame.kind in DELAYS:
            self._delays(frame, window)
        elif frame.kind == FrameKind.RETENTION:
            self._retention(frame, window)

    def _take_alike(self, frames: list[Frame]) -> bool:
        """Take messages frames of the current epoch at once; return False and take none if one is wrong."""
        by_subject: dict[str, list[Frame]] = {}
        for frame in frames:
            by_subject.setdefault(frame.subject, []).append(frame)
        if not all(map(self._continues, by_subject.values())) or not self._frame_order.take(frames):
            return False
        for some in by_subject.values():
            self._run(some[0])
            if len(some) > 1:
                self._run_on(some[1:])
        facts, last = self._facts, frames[-1]
        assert facts.piece is not None
        facts.piece |= {"end": last.end, "chain": last.chain, "size": last.offset}
        facts.frames += len(frames)
        facts.digest ^= int(np.bitwise_xor.reduce(np.array([frame.chain for frame in frames], np.uint64)))
        return True

    def _continues(self, frames: list[Frame]) -> bool:
        """Return whether these frames of one subject continue its run and each other."""
        run = self._runs.get(frames[0].subject)
        due = frames[0].first_sequence if run is None else run["last"]
        for frame in frames:
            if frame.first_sequence != due:
                return False
            due += frame.count
        return True

    def _run_on(self, frames: list[Frame]) -> None:
        """Add frames that continue their subject's run."""
        last = frames[-1]
        run, hours = self._runs[last.subject], self._of(last.subject)[1]
        run["last"], run["end"] = last.first_sequence + last.count, last.end
        for hour, some in groupby(frames, _hour):
            of = list(some)
            total = hours.setdefault(hour, [0, 0, of[0].first_sequence])
            total[0] += sum(frame.count for frame in of)
            total[1] += sum(frame.body_bytes for frame in of)

    def _of(self, subject: str) -> SubjectFacts:
        found = self._facts.subjects.get(subject)
        if found is None:
            found = self._facts.subjects[subject] = ([], {})
        return found

    def _run(self, frame: Frame) -> None:
        subject, begin = frame.subject, frame.first_sequence
        run = self._runs.get(subject)
        facts, hours = self._of(subject)
        if run is None or run["last"] != begin:
            if run is not None:
                self._problem(_jump(frame, run["last"]))
            run = {"kind": "run", "offset": frame.offset, "first": begin, "judged": run is not None}
            self._runs[subject] = run
            facts.append(run)
        run["last"], run["end"] = begin + frame.count, frame.end
        total = hours.setdefault(_hour(frame), [0, 0, begin])
        total[0] += frame.count
        total[1] += frame.body_bytes

    def _progress(self, frame: Frame, window: Window) -> None:
        run = self._runs.get(frame.subject)
        self._of(frame.subject)[0].append(
            {
                "kind": "progress",
                "offset": frame.offset,
                "frame": tuple(frame),
                "body": bytes(window.body(frame)),
                "last": run and run["last"],
            }
        )

    def _retention(self, frame: Frame, window: Window) -> None:
        try:
            self._facts.retention.append((frame.offset, frame.end, decode_retention(window.body(frame)).start))
        except NO_JSON as error:
            self._problem(Problem(frame.offset, frame.end, str(error), what=FindingKind.RETENTION))

    def _delays(self, frame: Frame, window: Window) -> None:
        try:
            self._facts.delayed.extend(delays.facts_of(frame, window.body(frame)))
            if frame.kind == FrameKind.CARRY:
                self._carried(frame, window)
        except (QmqError, ValueError) as error:
            self._problem(Problem(frame.offset, frame.end, str(error), frame.subject))

    def _carried(self, frame: Frame, window: Window) -> None:
        """Check the messages in a carry frame; raise QmqError or ValueError without a valid batch."""
        begin = batch_begin(frame.count, is_carry=True)
        batch = window.batch(frame)[begin:]
        ends, _ = check_batch(batch, frame.count, FRAME_BYTES_MAX)
        data = frame.offset + frame.body_at + begin + 4 * len(ends)
        for at, view in zip(ends, split_batch(batch, frame.count)):
            message, what = bytes(view), FindingKind.UNDECODABLE
            reason = decode_error(message)
            if reason is None and (subject := decode_envelope(message).subject) not in subjects_of(frame.subject):
                what, reason = FindingKind.FOREIGN, f"a message of {subject} in a frame of {frame.subject}"
            if reason is not None:
                about = frame.subject, data + at, what, id_or_none(message)
                self._problem(Problem(frame.offset, frame.end, reason, *about))

    def _batches(self, window: Window, batches: list[Frame]) -> None:
        """Check the messages of frames with intact bodies."""
        frames, begins, ends = cut(window, batches, self._problem)
        self._facts.messages += len(begins)
        if not frames:
            return
        messages = Messages(window, frames, begins, ends)
        for problem in messages.problems():
            self._problem(problem)
        for subject, offset, body in messages.tagged():
            self._of(subject)[0].append({"kind": "tags", "offset": offset, "body": body})
        for letter in messages.letters():
            self._of(letter.source)[0].append({"kind": "letter", "offset": letter.offset, "letter": letter})
        if self._wants_stored:
            self._facts.stored.append((window.offset, *messages.stored()))

    def _problem(self, problem: Problem) -> None:
        self._listed[problem.what] += 1
        if self._listed[problem.what] > PROBLEMS_MAX:
            self._facts.more[problem.what] += 1
            return
        self._facts.problems.append(
            {
                "kind": "problem",
                "offset": problem.offset,
                "end": problem.end,
                "text": problem.reason,
                "subject": problem.subject,
                "first": problem.sequence,
                "what": problem.what,
                "id": problem.id,
                "lacks": problem.lacks,
            }
        )

    def _lost(self) -> None:
        """Note damage: later frames may have jumped, so no rule may rely on earlier ones."""
        self._runs.clear()
        self._frame_order.forget()

    def facts(self) -> PieceFacts:
        """Return the facts of the finished piece."""
        facts = self._facts
        if facts.piece is not None:
            facts.piece["frame_order"] = self._frame_order
        for facts_of_subject, _ in facts.subjects.values():
            facts_of_subject.sort(key=_place)
        return facts


def _place(fact: Row) -> int:
    return int(fact["offset"])


def _hour(frame: Frame) -> int:
    return min(max(frame.timestamp_ms // HOUR_MS, 0), HOUR_MAX)


def cut(window: Window, batches: list[Frame], refuse: Any) -> tuple[list[Frame], Ints, Ints]:
    """Return the frames with a valid batch, and the begins and ends of their messages in the window, frame by frame.

    `refuse` is called with the problem of each other frame.
    """
    good = [frame for frame in batches if _has_labels(window, frame, refuse)]
    if not good:
        return [], np.zeros(0, np.int64), np.zeros(0, np.int64)
    counts = np.array([frame.count for frame in good], np.int64)
    at = np.array([frame.offset - window.offset + frame.body_at for frame in good], np.int64)
    room = np.array([len(window.batch(frame)) for frame in good], np.int64)
    fits = (counts > 0) & (counts <= BATCH_MESSAGES_MAX) & (4 * (counts + 1) <= room)
    ends, of = _ends(window, at, np.where(fits, counts, 0))
    firsts = np.flatnonzero(np.diff(of, prepend=-1))
    lasts = np.append(firsts[1:], len(of)) - 1
    sizes = np.diff(ends, prepend=0)
    sizes[firsts] = 0
    left = room - 4 * (counts + 1) - ends[lasts]
    fits &= (ends[firsts] == 0) & (left >= 0) & (left < 8) & (room % 8 == 0)
    fits &= np.minimum.reduceat(sizes, firsts) >= 0
    for number in np.flatnonzero(~fits).tolist():
        _refuse(window, good[number], refuse)
    data = (at + 4 * (counts + 1))[of] + ends
    keeps = fits[of]
    inner = np.ones(len(of), bool)
    inner[firsts] = False
    begins = np.flatnonzero(keeps & np.append(inner[1:], False))
    return [frame for frame, fit in zip(good, fits.tolist()) if fit], data[begins], data[begins + 1]


def _ends(window: Window, at: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return the end offsets of the batches at `at`, one more than messages, and the number of the batch of each."""
    of = np.repeat(np.arange(len(at)), counts + 1)
    first = np.cumsum(counts + 1) - (counts + 1)
    # Frames and bodies begin at multiples of 8.
    words = np.frombuffer(window.data[: len(window.data) // 4 * 4], "<u4")
    places = np.minimum(at[of] // 4 + np.arange(len(of)) - first[of], len(words) - 1)
    return words[places].astype(np.int64), of


def _has_labels(window: Window, frame: Frame, refuse: Any) -> bool:
    """Return whether the labels announced by a frame's flag are there."""
    if not frame.flags & FLAG_LABELLED:
        return True
    try:
        window.batch(frame)
    except ValueError as error:
        refuse(Problem(frame.offset, frame.end, str(error), frame.subject, frame.first_sequence))
        return False
    return True


def _refuse(window: Window, frame: Frame, refuse: Any) -> None:
    reason = "the body is no batch"
    try:
        check_batch(window.batch(frame), frame.count, FRAME_BYTES_MAX)
    except (QmqError, ValueError) as error:
        reason = str(error)
    refuse(Problem(frame.offset, frame.end, reason, frame.subject, frame.first_sequence))


def _jump(frame: Frame, expected: int) -> Problem:
    """Return the problem of a sequence that does not follow the one before."""
    found = frame.first_sequence
    what = f"gap: {found - expected} messages are missing" if found > expected else "repeated or reordered"
    reason = f"sequence {found} where {expected} is due ({what})"
    lacks = expected if found > expected else None
    return Problem(frame.offset, frame.end, reason, frame.subject, found, FindingKind.SEQUENCE, lacks=lacks)


ALL = ""
"""In place of a copy's name: true of all copies."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Range of a copy's log; `chain` is the chain before `start`, or None if unknown."""

    start: int
    end: int
    chain: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """Reader of one broker group's pieces. Where copies have the same bytes, the first one is judged for all."""

    logs: Mapping[str, LogRange]
    until_ms: int = FOREVER_MS
    begin: int = 0
    """An earlier run judged the bytes before; duplicates are not searched there."""

    def read(self, copies: Mapping[str, Storage], begin: int, end: int) -> dict[str, PieceFacts]:
        """Return the facts of the frames that begin in `[begin, end)`.

        One entry, ALL, if all copies have the same bytes, else one per copy.
        """
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
            same = {name: beside for name, beside in same.items() if is_next and beside.holds(at, window.data)}
            at = window.offset + size
        if at != walk.at:
            same = {}
        of_first = facts.facts()
        if len(same) == len(others):
            return {ALL: of_first}
        found = {first: of_first}
        for name in others:
            found[name] = of_first if name in same else self._alone(name, copies[name], begin, end)
        return found

    def _walk(self, name: str, copy: Storage, begin: int, end: int) -> Walk:
        log = self.logs[name]
        is_start = begin == log.start
        until = max(begin, min(end, log.end))
        return Walk(copy, begin, until, chain=log.chain if is_start else None, is_start=is_start)

    def _beside(self, name: str, copies: Mapping[str, Storage], first: Walk, begin: int, end: int) -> _Beside | None:
        """Return a reader of another copy beside `first`, or None if its piece begins or ends elsewhere."""
        ours = self.logs[next(iter(copies))]
        if min(end, ours.end) != min(end, self.logs[name].end):
            return None
        walk = self._walk(name, copies[name], begin, end)
        if walk.enter() or walk.at != first.at:
            return None
        return _Beside(copies[name], walk.at, walk.ahead)

    def _alone(self, name: str, copy: Storage, begin: int, end: int) -> PieceFacts:
        facts = Gathering(self.until_ms, wants_stored=begin >= self.begin)
        for window in self._walk(name, copy, begin, end).windows():
            facts.take(window)
        return facts.facts()


class _Beside:
    """Bytes of another copy, read in order."""

    def __init__(self, copy: Storage, at: int, ahead: bytes) -> None:
        self._copy = copy
        self._at = at
        self._left = memoryview(ahead)

    def holds(self, offset: int, data: memoryview) -> bool:
        """Return whether the copy has `data` at `offset`. Further bytes read are kept for the next call."""
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
            at = at + part
            self._left = found[part:]
        self._at = offset + at
        return True


def _is_same(ours: memoryview, theirs: memoryview) -> bool:
    """Return whether two equally long views have equal bytes. Comparing memoryviews directly goes byte by byte and is
    slow.
    """
    whole = len(ours) // 8 * 8
    if ours[whole:] != theirs[whole:]:
        return False
    return np.array_equal(np.frombuffer(ours[:whole], np.uint64), np.frombuffer(theirs[:whole], np.uint64))
