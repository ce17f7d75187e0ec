"""Core. Dead letters as the log has them: which message each is the copy of, and whether its group gave that one up.

A broker stores the copy while the group holds the original, and then acks that with `DEAD`. A process that ends between
the two leaves a copy whose original is delivered again: the next one acks it, or the group handles it after all.

Dead letters held against their originals: each exists, lies before its copy, and has the same content.

The original may lie anywhere before. A closed segment's index says where; of the segment that is being written, the
frames are walked, backwards from the dead letter, as most die soon. An index may be wrong: what it does not name is
walked for before anybody is blamed. What retention has taken is nobody's fault, and where bytes are damaged nothing is
said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from qmq.audit.findings import FindingKind, JudgeRow, finding
from qmq.audit.walk import Storage, Walk, Window
from qmq.codec import decode_envelope, decode_properties, split_batch
from qmq.dead_letters import GROUP, PRUNER, SUBJECT, fingerprint, original_subject
from qmq.errors import CorruptFrame, InvalidMessage, QmqError
from qmq.log.frame import FLAG_DEAD, Frame, FrameKind, check_body, decode_header
from qmq.log.group import Group, UnackedRange
from qmq.log.index import ClosedIndex, FrameRef
from qmq.log.progress_frame import DEAD, Progress
from qmq.message import TIMES
from qmq.subjects import parse_derived


class DeadLetter(NamedTuple):
    """A dead letter, at `[offset, end)`. Plain values: it is shuffled."""

    offset: int
    end: int
    subject: str
    number: int
    """Its own sequence."""
    id: str | None
    source: str
    """Where the original lies, under this sequence."""
    sequence: int
    group: str
    times: str | None
    """How often the group was delivered the original, as it says; None if no property could be added to it."""
    fingerprint: bytes

    def finding(self, what: FindingKind, text: str) -> dict[str, Any]:
        fields = {"offset": self.offset, "end": self.end, "subject": self.subject, "sequence": self.number}
        return {"what": what, "id": self.id, "text": f"dead letter of {self.source} {self.sequence}: {text}"} | fields

    def unfounded(self) -> dict[str, Any]:
        """Whoever finds that says the same, and so it is one finding."""
        return self.finding(FindingKind.DEAD_UNFOUNDED, f"group {self.group} held no such message before it")


def dead_letter_of(frame: Frame, message: bytes) -> DeadLetter | None:
    """Return the dead letter that a frame of its own or of a chosen subject holds; None: no broker made it."""
    derived, properties, identity = parse_derived(frame.subject), dict[str, str](), None
    try:
        envelope = decode_envelope(message)
        identity, properties = envelope.id, decode_properties(message, envelope.body_begin)
    except InvalidMessage:
        pass  # the original was none
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
    """Holds the dead letters of one subject's messages against what their groups were delivered. Made per copy."""

    def __init__(self) -> None:
        self._made: defaultdict[str, set[int]] = defaultdict(set)
        """Consumer group -> the originals of its dead letters since it began, or was moved."""

    def take(self, letter: DeadLetter, group: Group | None, *, may_be_older: bool) -> Iterator[dict[str, Any]]:
        """Take a dead letter, with what the group has before it. `may_be_older`: the log need not have the pull."""
        made = self._made[letter.group]
        if letter.sequence in made:
            yield letter.finding(FindingKind.DEAD_TWICE, f"group {letter.group} has one since it began")
        made.add(letter.sequence)
        consumer, held = _holder(group, letter.sequence)
        if held is None:
            if not may_be_older:
                yield letter.unfounded()
        elif (
            not may_be_older
            and letter.times is not None
            and letter.times != str(due := held.deliveries - (consumer == PRUNER))
        ):
            text = f"it says that it was delivered {letter.times} times, and it was {due} times"
            yield letter.finding(FindingKind.DEAD_ALTERED, text)

    def progress(self, frame: Frame, progress: Progress, group: Group | None) -> Iterator[tuple[int, str]]:
        """Take a progress frame, before the fold does. Yields (sequence, why) of messages that have no dead letter."""
        if frame.kind == FrameKind.POSITION and not progress.consumer:
            self._made.pop(progress.group, None)
        consumer = group.consumers.get(progress.consumer) if group is not None else None
        if frame.kind != FrameKind.ACK or consumer is None:
            return
        made = self._made.get(progress.group, ())
        for begin, end, settled in progress.entries:
            for held in consumer.overlapping(begin, end) if settled == DEAD else ():
                part = held.part(begin, end)
                for sequence in range(max(part.first, 0), part.end):  # what the log does not name is below 0
                    if sequence not in made:
                        yield sequence, f"group {progress.group}: acked as dead, and there is no dead letter of it"


def _holder(group: Group | None, sequence: int) -> tuple[str, UnackedRange | None]:
    for name, consumer in group.consumers.items() if group is not None else ():
        for unacked in consumer.unacked:
            if unacked.first <= sequence < unacked.end:
                return name, unacked
    return "", None


BLOCK_BYTES = 8 << 20
"""Of a segment without an index, this much is walked at once."""


class Log(Storage, Protocol):
    """One copy of a log."""

    def index(self, base: int) -> ClosedIndex | None:
        """Return the index of the closed segment at `base`; None if there is none that is whole."""

    def frame(self, offset: int, size: int) -> bytes:
        """Return the frame at `offset`, of `size` bytes; fewer if there is none. Raises OSError."""


class DeadLetterJudge:
    """Passes on what is wrong with dead letters."""

    def take(self, piece: int, problem: dict[str, Any], /) -> Iterator[JudgeRow]:
        row = dict(problem)
        yield finding(row.pop("what"), row.pop("text"), **row)

    def finish(self) -> Iterable[JudgeRow]:
        return ()


def check_dead_letters(log: Log, bases: Sequence[int], letters: Sequence[DeadLetter]) -> Iterator[dict[str, Any]]:
    """Yield what is wrong with the content of dead letters, as rows of findings.

    Args:
        bases: where the segments of this copy begin, ascending.
    """
    end = max((letter.offset for letter in letters), default=0)  # all originals lie before
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
    """Looks for the originals of some dead letters in segments `spans`, from the last one to the first; once.

    `absent`: what is not there. `wrong`: what has another content.
    """

    def __init__(self, log: Log, spans: Sequence[tuple[int, int]], end: int, letters: Iterable[DeadLetter]) -> None:
        self._log, self._spans, self._end = log, spans, end
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
        """Whatever an index says, look at the frames themselves."""
        for begin, end in reversed(self._spans):
            self._walk(begin, min(end, self._end))
        self._give_up_the_rest()
        if self._is_damaged:
            self.absent = []

    def _give_up_the_rest(self) -> None:
        if self._spans and self._spans[0][0] == 0:  # else retention may have taken it
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
        """Look at all frames of a segment, the last ones first, until nothing is left to be found in it."""
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
        """Hold the dead letters of this frame's messages against these."""
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
            return  # it is named where it lies
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
        """Sequences are dense: from `first` on, all of the subject's were looked at."""
        wanted = self._wanted.get(subject, {})
        for sequence in [sequence for sequence in wanted if sequence >= first]:
            self.absent += wanted.pop(sequence)
        if not wanted:
            self._wanted.pop(subject, None)


def _index_of(log: Log, begin: int, end: int) -> ClosedIndex | None:
    """Return the stored index of a whole segment; None if there is none, or it does not cover that."""
    index = log.index(begin)
    return index if index is not None and index.end == end else None


def _frame_at(log: Log, ref: FrameRef) -> Window | None:
    """Return a window with one frame; None if it is not there, or damaged."""
    try:
        data = log.frame(ref.offset, ref.length)
        frame = decode_header(data, 0, ref.offset, None)
        window = Window(ref.offset, memoryview(data), [frame])
        check_body(frame, window.body(frame))
    except (OSError, CorruptFrame):
        return None
    return window
