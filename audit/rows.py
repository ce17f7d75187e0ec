"""Core. What a walk over one piece of a log becomes in Spark: Arrow batches of records, which the audit reads.

Every byte of the piece is in exactly one row, so that Spark hashes all of it,
record by record: a message is a row, and so are the head of each frame (header, subject, end offsets), its padding,
and a whole frame of another kind. A window of the log is the data buffer of the Arrow array, uncopied.
Behind them come rows with a `fact`: what the frames of the piece say, small enough to be shuffled, sorted and joined.

    fact       fields
    piece      offset of the first frame, end of the last, header of the first, chain at the end, frames, value: the
               highest watermark, first and last: the newest epoch, total: the latest time in it, size: offset of the
               last frame, text: its epoch
    run        subject, offset and end of its frames, first and end sequence; a new one begins behind damage
    hour       subject, value: hours since 1970 UTC, total: messages, size: bytes, first: sequence of the first
    epoch      offset where it begins in this piece, first: term, last: boot
    problem    what (audit.kinds), offset, end, text: why, subject, first: sequence, and id, if known
    progress   a pull, ack or position frame: offset, end, subject, header, body, last: end of the subject if known
    delayed    what a delay server decided about one message (audit.delays)
    stored     offset of a window; header, body: its batches and ids (audit.messages: STORED); only if asked for
    retention  offset, end, first: from where on frames are kept
    tags       subject, offset of a frame, body: messages with tags from there on (audit.messages: TAGGED)
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from qmq.audit import delays
from qmq.audit.kinds import Kind
from qmq.audit.line import FOREVER_MS, Line
from qmq.audit.messages import Ints, Messages
from qmq.audit.walk import Problem, Walk, Window
from qmq.codec import check_batch
from qmq.errors import QmqError
from qmq.log.frame import DELAYS, FRAME_BYTES_MAX, PROGRESS, Frame, FrameKind
from qmq.log.retention import decode_retention

HOUR_MS = 3_600_000
ROWS_MAX = 65_536
"""Facts of a batch; a batch of records is one window."""

RECORDS = pa.schema(
    [("piece", pa.int64()), ("position", pa.int64()), ("sequence", pa.int64()), ("record", pa.binary()),
     ("fact", pa.string())]
)  # fmt: skip


def _hex(chain: int) -> str:
    """Write an unsigned 64-bit value: Spark has no such type."""
    return f"{chain:016x}"


class _Facts:
    """What the frames of one piece say, gathered while they pass. Memory grows with subjects, not with messages."""

    def __init__(self, until_ms: int, *, wants_stored: bool) -> None:
        self.ready: list[dict[str, Any]] = []
        self._runs: dict[str, dict[str, Any]] = {}
        self._hours: dict[tuple[str, int], list[int]] = {}
        self._line, self._wants_stored = Line(until_ms), wants_stored
        self._piece: dict[str, Any] = {}

    def problem(self, problem: Problem) -> None:
        self.ready.append(
            {"kind": "problem", "offset": problem.offset, "end": problem.end, "text": problem.reason,
             "subject": problem.subject, "first": problem.sequence, "what": problem.what, "id": problem.id}
        )  # fmt: skip

    def lost(self) -> None:
        """Bytes are damaged here: what follows may have jumped, and no rule may count on the frames before."""
        self._end_runs()
        self._line.lost()

    def _end_runs(self) -> None:
        self.ready.extend(self._runs.values())
        self._runs.clear()

    def frame(self, frame: Frame, window: Window) -> None:
        piece = self._piece
        if not piece:
            piece.update(kind="piece", offset=frame.offset, header=window.head(frame).hex(), frames=0)
        piece["frames"] += 1
        piece["end"], piece["chain"], piece["size"] = frame.end, frame.chain, frame.offset
        if frame.epoch != self._line.last_epoch:
            epoch = {"kind": "epoch", "offset": frame.offset, "first": frame.epoch.term, "last": frame.epoch.boot}
            self.ready.append(epoch)
        for problem in self._line.check(frame):
            self.problem(problem)
        if frame.kind == FrameKind.MESSAGES:
            self._messages(frame)
        elif frame.kind in PROGRESS and frame.offset not in window.damaged:
            self._progress(frame, window)
        elif frame.kind in DELAYS and frame.offset not in window.damaged:
            self._delays(frame, window)
        elif frame.kind == FrameKind.RETENTION and frame.offset not in window.damaged:
            self._retention(frame, window)

    def _retention(self, frame: Frame, window: Window) -> None:
        try:
            start = decode_retention(window.body(frame)).start
            self.ready.append({"kind": "retention", "offset": frame.offset, "end": frame.end, "first": start})
        except ValueError as error:
            self.problem(Problem(frame.offset, frame.end, str(error), what=Kind.RETENTION))

    def _delays(self, frame: Frame, window: Window) -> None:
        try:
            self.ready.extend(delays.facts_of(frame, window.body(frame)))
        except ValueError as error:
            self.problem(Problem(frame.offset, frame.end, str(error), frame.subject))

    def _messages(self, frame: Frame) -> None:
        subject, begin, end = frame.subject, frame.first_sequence, frame.first_sequence + frame.count
        run = self._runs.get(subject)
        if run is None or run["last"] != begin:
            if run is not None:
                self.problem(_jump(frame, run["last"]))
                self.ready.append(run)
            run = {"kind": "run", "subject": subject, "offset": frame.offset, "first": begin, "judged": run is not None}
            self._runs[subject] = run
        run["last"], run["end"] = end, frame.end
        hour = self._hours.setdefault((subject, frame.timestamp_ms // HOUR_MS), [0, 0, begin])
        hour[0] += frame.count
        hour[1] += frame.body_bytes

    def messages(self, window: Window, frames: list[Frame], begins: Ints, ends: Ints) -> None:
        """Look at the messages of these frames, which are whole."""
        messages = Messages(window, frames, begins, ends)
        for problem in messages.problems():
            self.problem(problem)
        for subject, offset, body in messages.tagged():
            self.ready.append({"kind": "tags", "subject": subject, "offset": offset, "body": body})
        if self._wants_stored:
            batches, ids = messages.stored()
            self.ready.append({"kind": "stored", "offset": window.offset, "header": batches, "body": ids})

    def _progress(self, frame: Frame, window: Window) -> None:
        run = self._runs.get(frame.subject)
        self.ready.append(
            {"kind": "progress", "offset": frame.offset, "end": frame.end, "subject": frame.subject,
             "header": window.head(frame).hex(), "body": window.body(frame).hex(), "last": run and run["last"]}
        )  # fmt: skip

    def take(self) -> list[dict[str, Any]]:
        """Return the facts that are complete, and forget them."""
        ready, self.ready = self.ready, []
        return ready

    def rest(self) -> list[dict[str, Any]]:
        """Return what is known only when the piece has ended."""
        self._end_runs()
        for (subject, hour), (messages, size, first) in self._hours.items():
            fact = {"kind": "hour", "subject": subject, "value": hour, "total": messages, "size": size, "first": first}
            self.ready.append(fact)
        if self._piece:
            line = {
                "text": str(self._line.last_epoch),
                "value": self._line.watermark,
                "total": self._line.time_ms,
                "chain": _hex(self._piece["chain"]),
            }
            self.ready.append(self._piece | line | {"first": self._line.epoch.term, "last": self._line.epoch.boot})
        return self.take()


def _jump(frame: Frame, expected: int) -> Problem:
    """Name a sequence that does not follow the one before it."""
    found = frame.first_sequence
    what = f"gap: {found - expected} messages are missing" if found > expected else "repeated or reordered"
    reason = f"sequence {found} where {expected} is due ({what})"
    return Problem(frame.offset, frame.end, reason, frame.subject, found, Kind.SEQUENCE)


def record_batches(
    walk: Walk, piece: int, *, until_ms: int = FOREVER_MS, wants_stored: bool = False
) -> Iterator[pa.RecordBatch]:
    """Return the piece that begins at `piece` as records, then its facts. See the module's text.

    `until_ms`: when the audit began; a later time is wrong. `wants_stored`: facts of what may be stored once, too.
    """
    facts = _Facts(until_ms, wants_stored=wants_stored)
    for window in walk.windows():
        batch = _records_of(window, piece, facts)
        if batch is not None:
            yield batch
        if len(facts.ready) >= ROWS_MAX:
            yield _fact_rows(piece, facts.take())
    yield _fact_rows(piece, facts.rest())


def _records_of(window: Window, piece: int, facts: _Facts) -> pa.RecordBatch | None:
    cuts, sequences = array("i", [0]), array("q")
    cut: list[Frame] = []
    damage = iter(sorted(p.offset for p in window.problems if p.offset not in window.damaged))
    next_damage = next(damage, None)
    for problem in window.problems:
        facts.problem(problem)
    for frame in window.frames:
        while next_damage is not None and next_damage < frame.offset:
            facts.lost()
            next_damage = next(damage, None)
        facts.frame(frame, window)
        # Also cut in front of each frame: then the records are the same wherever a copy's windows and segments end.
        _cut_at(frame.offset - window.offset, cuts, sequences)
        if frame.kind == FrameKind.MESSAGES and frame.offset not in window.damaged:
            if _cut(window, frame, cuts, sequences, facts):
                cut.append(frame)
    if next_damage is not None:
        facts.lost()
    size = len(window.data)
    if not size:
        return None
    _cut_at(size, cuts, sequences)
    n = len(sequences)
    if cut:
        rows = np.flatnonzero(np.frombuffer(sequences, np.int64) >= 0)
        places = np.frombuffer(cuts, np.int32).astype(np.int64)
        facts.messages(window, cut, places[rows], places[rows + 1])
    record = pa.Array.from_buffers(pa.binary(), n, [None, pa.py_buffer(cuts), pa.py_buffer(window.data)])
    sequence = pa.Array.from_buffers(pa.int64(), n, [None, pa.py_buffer(sequences)])
    base = window.offset
    # Not by pyarrow.compute: to import it costs a worker 0.7 s, this 40 ns per record.
    positions = array("q", [base + cut for cut in cuts])
    position = pa.Array.from_buffers(pa.int64(), n, [None, pa.py_buffer(positions)])
    columns = [pa.repeat(pa.scalar(piece, pa.int64()), n), position, sequence, record, pa.nulls(n, pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=RECORDS)


def _cut_at(at: int, cuts: array[int], sequences: array[int]) -> None:
    """End a record that is no message at `at`, if there is any byte since the last cut."""
    if cuts[-1] < at:
        cuts.append(at)
        sequences.append(-1)


def _cut(window: Window, frame: Frame, cuts: array[int], sequences: array[int], facts: _Facts) -> bool:
    """Cut the messages of a frame out of the window, if there are any; what lies since the last cut is a record."""
    try:
        ends, _ = check_batch(window.batch(frame), frame.count, FRAME_BYTES_MAX)
    except (QmqError, ValueError) as error:
        facts.problem(Problem(frame.offset, frame.end, str(error), frame.subject, frame.first_sequence))
        return False
    data = frame.offset - window.offset + frame.body_at + 4 * len(ends)
    cuts.extend([data + end for end in ends])
    sequences.append(-1)
    sequences.extend(range(frame.first_sequence, frame.first_sequence + frame.count))
    return True


def _fact_rows(piece: int, facts: list[dict[str, Any]]) -> pa.RecordBatch:
    n = len(facts)
    columns = [
        pa.repeat(pa.scalar(piece, pa.int64()), n), pa.nulls(n, pa.int64()), pa.nulls(n, pa.int64()),
        pa.nulls(n, pa.binary()), pa.array([json.dumps(fact) for fact in facts], pa.string()),
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=RECORDS)
