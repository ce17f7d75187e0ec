"""Core. Dead letters against the log: each copies an existing, earlier original that its group has given up.

A broker stores the copy while the group holds the original, then acks the original with `DEAD`. If the process ends in
between, the original is delivered again; the next dead letter acks it, or the group handles it after all.

The original may lie anywhere before its copy. Closed segments are searched by index. The segment being written is
walked backwards from the dead letter, as most originals lie shortly before it. An index may be wrong: before a finding,
the frames are walked for everything that the indexes lack. Originals removed by retention or within damaged ranges
cause no finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from qmq.audit.findings import FindingKind
from qmq.audit.walk import Storage, Walk, Window
from qmq.codec import decode_envelope, decode_properties, split_batch
from qmq.dead_letters import GROUP, PRUNER, SUBJECT, earlier_deliveries, fingerprint, original_subject
from qmq.errors import CorruptFrame, InvalidMessage, QmqError
from qmq.log.frame import FLAG_DEAD, Frame, FrameKind, check_body, decode_header
from qmq.log.group import Group, UnackedRange
from qmq.log.index import ClosedIndex, FrameRef
from qmq.log.progress_frame import DEAD, Progress
from qmq.message import TIMES
from qmq.subjects import parse_derived


class DeadLetter(NamedTuple):
    """Dead letter at `[offset, end)`, in plain values for the shuffle."""

    offset: int
    end: int
    subject: str
    number: int
    """Sequence of the dead letter itself."""
    id: str | None
    source: str
    """Subject of the original, which has `sequence` there."""
    sequence: int
    group: str
    times: str | None
    """Stated number of deliveries of the original; None if there was no room for the property."""
    fingerprint: bytes

    def finding(self, what: FindingKind, text: str) -> dict[str, Any]:
        fields = {"offset": self.offset, "end": self.end, "subject": self.subject, "sequence": self.number}
        return {"what": what, "id": self.id, "text": f"dead letter of {self.source} {self.sequence}: {text}"} | fields

    def unfounded(self) -> dict[str, Any]:
        """Return the finding that no original was unacked. Both checks build the same row, so it is reported once."""
        row = self.finding(FindingKind.DEAD_UNFOUNDED, f"group {self.group} had no such message unacked before it")
        return row | {"about": [self.source, self.sequence, self.sequence + 1]}


def dead_letter_of(frame: Frame, message: bytes) -> DeadLetter | None:
    """Return the dead letter in a frame of its own or of a chosen subject, or None if no broker made it."""
    derived, properties, identity = parse_derived(frame.subject), dict[str, str](), None
    try:
        envelope = decode_envelope(message)
        identity, properties = envelope.id, decode_properties(message)
    except InvalidMessage:
        pass  # the original was invalid
    if frame.flags & FLAG_DEAD:
        whose = properties.get(SUBJECT, ""), properties.get(GROUP, "")
    elif derived is not None:
        whose = derived.real, derived.group
    else:
        return None
    if (source := original_subject(whose, frame.producer)) is None:
        return None
    about = frame.offset, frame.end, frame.subject, frame.first_sequence, identity
    return DeadLetter(*about, source, frame.batch, whose[1], properties.get(TIMES), fingerprint(message))


class DeadLetterHistory:
    """Comparison of the dead letters of one subject's messages with the deliveries of their groups. One per copy."""

    def __init__(self) -> None:
        self._made: defaultdict[str, set[int]] = defaultdict(set)
        """Consumer group -> originals of its dead letters since it began or was moved."""

    def take(self, letter: DeadLetter, group: Group | None, *, may_be_older: bool) -> Iterator[dict[str, Any]]:
        """Check a dead letter against the group's state before it. `may_be_older`: the pull may lie before the log."""
        made = self._made[letter.group]
        if letter.sequence in made:
            yield letter.finding(FindingKind.DEAD_TWICE, f"group {letter.group} has one since it began")
        made.add(letter.sequence)
        consumer, held = _holder(group, letter.sequence)
        if held is None:
            if not may_be_older:
                yield letter.unfounded()
        elif not may_be_older and letter.times is not None and not _may_be(letter, held, is_pruned=consumer == PRUNER):
            text = f"its qmq_times is {letter.times}; by the log, the last attempt was number {held.attempts}"
            yield letter.finding(FindingKind.DEAD_ALTERED, text)

    def progress(self, frame: Frame, progress: Progress, group: Group | None) -> Iterator[tuple[int, str]]:
        """Take a progress frame before the fold does. Yield (sequence, reason) of messages without a dead letter."""
        if frame.kind == FrameKind.POSITION and not progress.consumer:
            self._made.pop(progress.group, None)
        consumer = group.consumers.get(progress.consumer) if group is not None else None
        if frame.kind != FrameKind.ACK or consumer is None:
            return
        made = self._made.get(progress.group, ())
        for begin, end, settled in progress.entries:
            for held in consumer.overlapping(begin, end) if settled == DEAD else ():
                part = held.part(begin, end)
                for sequence in range(max(part.first, 0), part.end):  # messages unknown to the log are below 0
                    if sequence not in made:
                        yield sequence, f"group {progress.group}: acked as dead, and there is no dead letter of it"


def _may_be(letter: DeadLetter, held: UnackedRange, *, is_pruned: bool) -> bool:
    """Return whether the letter states a possible number of deliveries of its original.

    A delivery without a begun handler counts only in letters of version 0.2 and earlier; these count suspicions too.
    """
    last, older = held.attempts - 1, held.deliveries - is_pruned
    counts = {last, older} if is_pruned else {last, held.attempts, older}
    if parse_derived(letter.source) is None:
        return letter.times in {str(count) for count in counts}
    return min(counts) <= earlier_deliveries(letter.times) + 1  # the mailbox's message states the earlier ones


def _holder(group: Group | None, sequence: int) -> tuple[str, UnackedRange | None]:
    for name, consumer in group.consumers.items() if group is not None else ():
        for unacked in consumer.unacked:
            if unacked.first <= sequence < unacked.end:
                return name, unacked
    return "", None


BLOCK_BYTES = 8 << 20
"""Step of the walk in a segment without an index."""


def check_dead_letters(log: Storage, bases: Sequence[int], letters: Sequence[DeadLetter]) -> Iterator[dict[str, Any]]:
    """Yield problems in the content of dead letters, as rows of findings.

    Args:
        bases: offsets of this copy's segments, ascending.
    """
    end = max((letter.offset for letter in letters), default=0)  # all originals lie before it
    spans = [(base, behind) for base, behind in pairwise([*bases, max(end, *bases)]) if base < end]
    search = _Search(log, spans, end, letters)
    search.by_index()
    if search.absent:
        again = _Search(log, spans, end, search.absent)
        again.by_frames()
        search.absent, search.wrong = again.absent, search.wrong + again.wrong
    yield from search.wrong
    for letter in search.absent:
        yield letter.unfounded()


class _Search:
    """One search for the originals of dead letters, in the segments `spans`, from the last to the first.

    `absent`: dead letters without original. `wrong`: findings about other contents.
    """

    def __init__(self, log: Storage, spans: Sequence[tuple[int, int]], end: int, letters: Iterable[DeadLetter]) -> None:
        self._log = log
        self._spans = spans
        self._end = end
        self._wanted: defaultdict[str, dict[int, list[DeadLetter]]] = defaultdict(dict)
        for letter in letters:
            self._wanted[letter.source].setdefault(letter.sequence, []).append(letter)
        self._is_damaged = False
        self.absent: list[DeadLetter] = []
        self.wrong: list[dict[str, Any]] = []

    def by_index(self) -> None:
        for begin, end in reversed(self._spans):
            if not self._wanted:
                return
            index = _index_of(self._log, begin, end)
            if index is None:
                self._walk(begin, min(end, self._end))
            else:
                self._look_up(index)
        self._give_up_the_rest()

    def by_frames(self) -> None:
        """Search the frames themselves, without indexes."""
        for begin, end in reversed(self._spans):
            self._walk(begin, min(end, self._end))
        self._give_up_the_rest()
        if self._is_damaged:
            self.absent = []

    def _give_up_the_rest(self) -> None:
        if self._spans and self._spans[0][0] == 0:  # else retention may have removed it
            for subject in list(self._wanted):
                self._give_up(subject, 0)

    def _look_up(self, index: ClosedIndex) -> None:
        for subject in list(self._wanted):
            first = index.first_sequence(subject)
            if first is None:
                continue
            for sequence in sorted(self._wanted[subject]):
                if sequence < first or sequence not in self._wanted.get(subject, {}):
                    continue
                for ref in index.frames(subject, sequence, 1):
                    window = _frame_at(self._log, ref)
                    if window is not None:
                        self._compare(window, window.frames[0])
            self._give_up(subject, first)

    def _walk(self, begin: int, end: int) -> None:
        """Search the frames of a segment, last ones first, until no original can be left in it."""
        firsts: dict[str, int] = {}
        while self._wanted and end > begin:
            low = max(begin, end - BLOCK_BYTES)
            for window in Walk(self._log, low, end, is_start=low == begin).windows():
                self._is_damaged = self._is_damaged or bool(window.problems)
                for frame in window.frames:
                    if frame.kind == FrameKind.MESSAGES and frame.subject in self._wanted:
                        firsts[frame.subject] = min(frame.first_sequence, firsts.get(frame.subject, 1 << 64))
                        self._compare(window, frame)
            end = low
            for subject, first in firsts.items():
                self._give_up(subject, first)

    def _compare(self, window: Window, frame: Frame) -> None:
        """Compare dead letters with the originals in this frame."""
        wanted = self._wanted.get(frame.subject)
        if not wanted or frame.offset in window.damaged:
            return
        sequences = range(frame.first_sequence, frame.first_sequence + frame.count)
        here = (
            [sequence for sequence in sequences if sequence in wanted]
            if len(wanted) > frame.count
            else [*wanted.keys() & sequences]
        )
        if not here:
            return
        try:
            messages = list(split_batch(window.batch(frame), frame.count))
        except (QmqError, ValueError):
            return  # reported at its own place
        for sequence in here:
            for letter in wanted.pop(sequence):
                if frame.offset >= letter.offset:
                    self.absent.append(letter)
                elif fingerprint(bytes(messages[sequence - frame.first_sequence])) != letter.fingerprint:
                    text = f"its content is not that of the original at offset {frame.offset}"
                    self.wrong.append(letter.finding(FindingKind.DEAD_ALTERED, text))
        if not wanted:
            del self._wanted[frame.subject]

    def _give_up(self, subject: str, first: int) -> None:
        """Give up originals of a subject from `first` on: sequences are dense, so all of them were searched."""
        wanted = self._wanted.get(subject, {})
        for sequence in [sequence for sequence in wanted if sequence >= first]:
            self.absent += wanted.pop(sequence)
        if not wanted:
            self._wanted.pop(subject, None)


def _index_of(log: Storage, begin: int, end: int) -> ClosedIndex | None:
    """Return the stored index if it covers the whole segment, else None."""
    index = log.index(begin)
    return index if index is not None and index.end == end else None


def _frame_at(log: Storage, ref: FrameRef) -> Window | None:
    """Return a window with one frame, or None if the frame is absent or damaged."""
    try:
        data = log.frame(ref.offset, ref.length)
        frame = decode_header(data, 0, ref.offset, None)
        window = Window(ref.offset, memoryview(data), [frame])
        check_body(frame, window.body(frame))
    except (OSError, CorruptFrame):
        return None
    return window
