"""Core. Judge of one subject's pulls, acks, nacks and positions: they must follow from the log, by the brokers' own
fold.

`qmq.log.fold.apply` applies progress frames and rejects impossible ones. Here it gets the frames of one subject only;
those of other subjects do not affect it. In addition, a pull that delivers more than the subject has is a finding.

A log that begins after its retention lacks earlier deliveries. So for groups older than the log, two kinds of
statements are accepted: those about messages older than the log, and those about pull sequences before the first
delivery in this log. Everything else is judged.

The log does not store filters, only deliveries. A consumer gets the messages with its tags, any of them or all. So a
consumer that got a message without tags has no filter and gets every message; and of two messages with equal tags it
gets both or none. A pull that passes over messages and delivers others with the same tags contradicts itself. So does a
pull between two others of the same consumer and epoch that both delivered such messages. The filter may change once in
between, not twice, unless a pull without entries announces the change, or the consumer left.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from qmq.audit.conservation import Account, broken_at, per_hour, skipped_at
from qmq.audit.dead_letters import DeadLetter, DeadLetterHistory
from qmq.audit.findings import MOVED, FindingKind, Row
from qmq.audit.messages import TAGGED, Ints
from qmq.errors import QmqError
from qmq.log.fold import State, apply
from qmq.log.frame import Frame, FrameKind
from qmq.log.group import MASTERSHIP_BITS, Consumer, Group, UnackedRange
from qmq.log.progress_frame import (
    DEFERRED,
    EXPIRED,
    NOT_BEGUN,
    NUMBERS_END,
    OVERFLOWED,
    PASSED,
    Progress,
    decode_progress,
)
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.ranges import Range
from qmq.remoting.commands import DELAY_MS_MAX
from qmq.types import Epoch


class _Delivered(NamedTuple):
    """A pull that delivered pull sequences from `number` on."""

    number: int
    frame: Frame


def _named(progress: Progress) -> str:
    return f"group {progress.group}" + (f", consumer {progress.consumer}" if progress.consumer else "")


def _is_next(group: Group | None, progress: Progress) -> bool:
    """Return whether this is a pull of one range with the next number, as most are."""
    consumer = group.consumers.get(progress.consumer) if group is not None else None
    return consumer is not None and len(progress.entries) == 1 and progress.entries[0][0] == consumer.next_pull


def _number_of(delivered: _Delivered) -> int:
    return delivered.number


_WITHIN_MASTERSHIP = (1 << MASTERSHIP_BITS) - 1
CONSERVED = "conserved"
"""Kind of a row that holds an equation, in place of a kind of finding."""
ANY = 1 << 63
"""Above the number of messages in any subject."""


class ConsumptionJudge:
    """Judge of the progress of one subject, for one copy or for all equal copies. Takes facts (`audit.facts`) in order.

    Args:
        start: offset where the log, or reading, begins.
    """

    def __init__(self, subject: str, start: int) -> None:
        self._subject = subject
        self._start = start
        self._state = State()
        self._subject_end = 0 if start == 0 else None
        self._passing = Passing()
        self._letters = DeadLetterHistory()
        self._accounts: dict[str, Account] = {}
        self._hours: list[tuple[int, int]] = []
        self._is_whole = True
        """Whether the subject has no gap, so that every message can be accounted for."""
        self._given_up: set[str] = set()
        self._old: set[str] = set()
        """Groups older than the log."""
        self._numbers: dict[tuple[str, str], int] = {}
        """(group, consumer) -> first pull sequence delivered in this log."""
        self._delivered: dict[tuple[str, str], list[_Delivered]] = {}
        """(group, consumer) -> pulls with unacked messages."""
        self._doubted: set[str] = set()
        """Groups of a dead letter without an unacked original: the ack behind it contradicts the log, too."""
        self._beyond: dict[str, int] = {}
        """Group -> end of the subject at its first pull past that end."""
        self._first = ANY
        """First message of the subject in this log."""

    def hour(self, hour: int, first: int) -> None:
        """Record the hour in which messages from the sequence `first` on were stored."""
        self._hours.append((first, hour))

    def judge(self, fact: Row) -> Iterator[Row]:
        """Take a fact; yield its problems as rows."""
        kind = fact["kind"]
        if kind == "progress":
            frame = Frame._make(fact["frame"])
            if frame.kind == FrameKind.POSITION:
                yield from self._moved(frame, fact["body"])
            for complaint in self._complaints(frame, fact["body"], fact["last"]):
                yield self._row(frame, complaint)
        elif kind == "run":
            self._run(fact["first"], fact["last"])
        elif kind == "tags":
            self._passing.tags(fact["body"])
        elif kind == "letter":
            yield from self._letter(fact["letter"])

    def _moved(self, frame: Frame, body: bytes) -> Iterator[Row]:
        """Yield a row of MOVED for a group that was moved or removed; brokers forget broadcast consumers themselves."""
        with suppress(ValueError):  # judged below
            name, consumer, entries = decode_progress(body)
            group = self._state.groups.get((frame.subject, name))
            if not consumer and group is not None and (entries or not (group.is_broadcast or name in self._old)):
                text = f"group {name} was " + (f"moved to sequence {entries[0][0]}" if entries else "removed")
                about = {"subject": frame.subject, "consumer_group": name, "at_ms": frame.timestamp_ms}
                yield {"what": MOVED, "offset": frame.offset, "end": frame.end, "text": text} | about

    def _row(self, frame: Frame, complaint: Complaint) -> Row:
        return {
            "what": complaint.what,
            "offset": complaint.offset or frame.offset,
            "end": complaint.end or frame.end,
            "subject": self._subject,
            "sequence": complaint.sequence,
            "id": None,
            "text": complaint.text,
            "about": None if complaint.about is None else [self._subject, *complaint.about],
        }

    def _run(self, first: int, end: int) -> None:
        if self._subject_end is not None and first != self._subject_end:
            self._passing.is_known = self._is_whole = False
        # The run counts from its end on; progress frames within the run carry the exact end in `last`.
        self._subject_end = end
        if self._first == ANY:
            self._first = first
            for name in self._old:
                self._state.groups[self._subject, name].position = first

    def _letter(self, letter: DeadLetter) -> Iterator[Row]:
        if letter.group not in self._given_up:
            group = self._state.groups.get((letter.source, letter.group))
            may_be_older = self._start != 0 and (group is None or letter.group in self._old)
            for row in self._letters.take(letter, group, may_be_older=may_be_older):
                if row["what"] == FindingKind.DEAD_UNFOUNDED:
                    self._doubted.add(letter.group)
                yield row

    def _complaints(self, frame: Frame, body: bytes, last: int | None) -> Iterator[Complaint]:
        try:
            progress = decode_progress(body)
        except ValueError as error:
            yield Complaint(FindingKind.PROGRESS, str(error))
            return
        subject_end = last if last is not None else self._subject_end
        if frame.kind == FrameKind.PULL:
            for complaint in self._pull_complaints(frame, progress, subject_end):
                yield complaint._replace(text=f"{_named(progress)}: {complaint.text}")
        elif frame.kind == FrameKind.POSITION:
            self._passing.forget(progress.group, progress.consumer, frame.epoch)
            if not progress.consumer and progress.entries and subject_end is not None:
                if (position := progress.entries[0][0]) > subject_end:
                    text = f"{_named(progress)}: put at sequence {position}, the subject ends at {subject_end}"
                    yield Complaint(FindingKind.POSITION, text)
        if progress.group in self._given_up and not (frame.kind == FrameKind.POSITION and not progress.consumer):
            return
        if self._start != 0:
            self._learn(frame, progress)
        group = self._state.groups.get((frame.subject, progress.group))
        for sequence, text in self._letters.progress(frame, progress, group):
            yield Complaint(FindingKind.DEAD_MISSING, text, sequence)
        if frame.kind != FrameKind.ACK and not _is_next(group, progress):
            for text in self._impossible_numbers(frame, progress, group):
                yield Complaint(FindingKind.PROGRESS, f"{_named(progress)}: {text}")
        is_doubted = progress.group in self._doubted
        self._doubted.discard(progress.group)
        try:
            self._state.end = frame.offset
            self._account(frame, progress)
            apply(self._state, frame, progress)
            self._given_up.discard(progress.group)
        except (QmqError, ValueError, LookupError) as error:
            self._given_up.add(progress.group)
            text = f"{_named(progress)}: {getattr(error, 'reason', error)}; the rest of this group is not judged"
            if not is_doubted:
                yield Complaint(FindingKind.PROGRESS, text)
            return
        self._note_delivered(frame, progress, group)

    def _pull_complaints(self, frame: Frame, progress: Progress, subject_end: int | None) -> Iterator[Complaint]:
        """Yield complaints about the messages of a pull: not stored yet, or passed over without reason."""
        end = 0
        for _, sequence, messages in progress.entries:
            if sequence + messages > end:
                end = sequence + messages
        if subject_end is not None and end > subject_end:
            if self._beyond.get(progress.group) != subject_end:
                self._beyond[progress.group] = subject_end
                text = f"pulled to sequence {end}, the subject ends at {subject_end}"
                yield Complaint(FindingKind.PROGRESS, text, about=(subject_end, end))
            return
        if not progress.entries:
            self._passing.forget(progress.group, progress.consumer, frame.epoch)
        group = self._state.groups.get((frame.subject, progress.group))
        yield from self._passing.pull(frame, progress, self._first, ANY if group is None else group.position)

    def _impossible_numbers(self, frame: Frame, progress: Progress, group: Group | None) -> Iterator[str]:
        """Yield why no broker writes such numbers: a hole in pull sequences, or a retry time beyond the limit."""
        if frame.kind == FrameKind.NACK:
            latest = max((due for _, _, due in progress.entries if due != NOT_BEGUN), default=0)
            if latest > frame.timestamp_ms + DELAY_MS_MAX:
                yield f"requeued for {(latest - frame.timestamp_ms) // 1000} s; the limit is {DELAY_MS_MAX // 1000} s"
        consumer = group.consumers.get(progress.consumer) if group is not None else None
        if frame.kind != FrameKind.PULL or consumer is None or not consumer.next_pull:
            return
        if progress.group in self._old and (progress.group, progress.consumer) not in self._delivered:
            return  # earlier pulls are unknown
        due = consumer.next_pull
        for number, _, messages in progress.entries:
            if number >= NUMBERS_END:
                continue
            if number > due and number & _WITHIN_MASTERSHIP and number >> MASTERSHIP_BITS == due >> MASTERSHIP_BITS:
                yield f"pull sequence {number} where {due} is due"
            due = number + messages

    def _note_delivered(self, frame: Frame, progress: Progress, group: Group | None) -> None:
        """Record the time of a delivery, and forget settled pulls. `group`: its state before this frame."""
        key = progress.group, progress.consumer
        if frame.kind == FrameKind.PULL:
            for number, _, _ in progress.entries:
                if number < NUMBERS_END:
                    if (known := self._delivered.get(key)) is None:
                        known = self._delivered[key] = []
                    known.append(_Delivered(number, frame))
                    return
        elif frame.kind == FrameKind.POSITION:
            for gone in [key] if progress.consumer else [of for of in self._delivered if of[0] == key[0]]:
                self._delivered.pop(gone, None)
        elif group is not None and (pulls := self._delivered.get(key)) is not None and len(pulls) > 1:
            end = group.consumers[progress.consumer].acked_end
            if pulls[1].number <= end:
                del self._delivered[key][: bisect_right(pulls, end, key=_number_of) - 1]

    def _unacked(self) -> Iterator[Row]:
        """Yield the first unacked messages of each consumer, with the time of their delivery."""
        for (name, consumer), pulls in sorted(self._delivered.items()):
            group = self._state.groups.get((self._subject, name))
            known = None if group is None or name in self._given_up else group.consumers.get(consumer)
            if known is None or not known.unacked or pulls[0].number > known.unacked[0].pull:
                continue
            frame = pulls[max(0, bisect_right(pulls, known.unacked[0].pull, key=_number_of) - 1)].frame
            first, count = known.unacked[0].first, known.unacked_messages
            text = f"group {name}, consumer {consumer}: {count} messages are unacked, the first one since this pull"
            complaint = Complaint(FindingKind.UNACKED, text, first)
            yield self._row(frame, complaint) | {"since": frame.timestamp_ms}

    def _account(self, frame: Frame, progress: Progress) -> None:
        group = self._state.groups.get((frame.subject, progress.group))
        if frame.kind == FrameKind.POSITION and not progress.consumer and not progress.entries:
            self._accounts.pop(progress.group, None)  # the group was forgotten
            return
        account = self._accounts.setdefault(progress.group, Account(0))
        account.take(frame, progress, group)

    def finish(self) -> Iterator[Row]:
        """Yield findings about messages unacked for long; then, of each group of the finished subject, the violations
        of its equation and the equation itself, as rows of CONSERVED.
        """
        yield from self._unacked()
        if not self._is_whole or self._subject_end is None or self._first == ANY:
            return
        subject, end = self._subject, self._subject_end
        for name, account in sorted(self._accounts.items()):
            group = self._state.groups.get((subject, name))
            if group is None or name in self._given_up:
                continue
            begin = max(account.begin, self._first)
            ranges, hours = account.ranges(group, begin, end), sorted(self._hours)
            row: Row = {"offset": None, "end": None, "subject": subject, "sequence": None, "id": None}
            if (broken := broken_at(ranges, begin, end)) is not None:
                text = f"group {name}: message {broken[0]} is {broken[1]}"
                yield row | {"what": FindingKind.CONSERVATION, "sequence": broken[0], "text": text}
            if (skipped := skipped_at(account, hours)) is not None:
                text = f"group {name}: begins behind message {skipped}, which was stored after the group had begun"
                yield row | {"what": FindingKind.CONSERVATION, "sequence": skipped, "text": text}
            for hour in per_hour(ranges, begin, end, hours):
                equation = {"group": name, "nacked": account.nacked, **hour}
                yield row | {"what": CONSERVED, "sequence": hour["hour"], "text": json.dumps(equation)}

    def _learn(self, frame: Frame, progress: Progress) -> None:
        """Add state from before the log, as far as this frame reveals it."""
        key = (frame.subject, progress.group)
        group = self._state.groups.get(key)
        if group is None:
            if frame.kind == FrameKind.POSITION and progress.entries and not progress.consumer:
                return  # a new or moved group: earlier state does not count
            group = self._state.groups[key] = Group(position=self._first)
            self._old.add(progress.group)
        if progress.group not in self._old:
            return
        if frame.kind == FrameKind.PULL:
            self._learn_pull(group, progress)
        elif frame.kind in (FrameKind.ACK, FrameKind.NACK):
            consumer = group.consumers.setdefault(progress.consumer, Consumer())
            for begin, end, _ in progress.entries:
                end = min(end, self._numbers.get((progress.group, progress.consumer), end))
                if begin < end:
                    _add_unacked(consumer, begin, end)
        elif not progress.consumer:
            self._old.discard(progress.group)

    def _learn_pull(self, group: Group, progress: Progress) -> None:
        numbers = [number for number, _, _ in progress.entries if number < NUMBERS_END]
        if numbers:
            self._numbers.setdefault((progress.group, progress.consumer), numbers[0])
        for _, sequence, messages in progress.entries:
            if sequence < self._first == group.position < sequence + messages:
                group.position = sequence  # the pull delivers the last old messages and the first new ones
            elif sequence < self._first:
                _requeue_unknown(group, sequence, min(sequence + messages, self._first))


def _add_unacked(consumer: Consumer, begin: int, end: int) -> None:
    """Add these pull sequences, of messages unknown to the log, to the unacked ones of a consumer."""
    consumer.next_pull = max(consumer.next_pull, end)
    consumer.take(begin, end)
    consumer.unacked.append(UnackedRange(begin, -end, end - begin, 1))
    consumer.unacked.sort()


def _requeue_unknown(group: Group, begin: int, end: int) -> None:
    """Requeue these messages, in place of any other state that the group has of them."""
    kept, unknown = [], RequeuedRange(begin, end - begin, 0, 0)
    for requeued in group.requeued:
        parts = (requeued.first, min(requeued.end, begin)), (max(requeued.first, end), requeued.end)
        kept += [requeued.part(low, high) for low, high in parts if low < high]
        if requeued.first <= end < requeued.end:
            unknown = RequeuedRange(begin, end - begin, *requeued[2:])  # one range together
    group.requeued = Requeued(sorted(kept))
    group.requeued.add(unknown)


UNTAGGED = 0
Key = tuple[str, str, Epoch]
"""(consumer group, consumer, epoch)"""


class Complaint(NamedTuple):
    """Problem of a progress frame: of the current one, or of the one at `offset`."""

    what: FindingKind
    text: str
    sequence: int | None = None
    offset: int | None = None
    end: int | None = None
    about: tuple[int, int] | None = None
    """Messages of the subject: a gap in them is the cause."""


class _Passed(NamedTuple):
    """Messages passed over by one pull."""

    frame: Frame
    begin: int
    messages: int
    tags: frozenset[int]


class Passing:
    """Passed-over and delivered messages of one subject's groups. One per copy and subject."""

    def __init__(self) -> None:
        self._sequences: list[Ints] = []
        self._tags: list[Ints] = []
        self._got: dict[Key, list[Range]] = {}
        """Sequences delivered by the last pull. Their tags are looked up only when messages are passed over."""
        self._open: dict[Key, list[_Passed]] = {}
        self.is_known = True
        """Whether all messages that pulls may name are present."""

    def tags(self, packed: bytes) -> None:
        """Record messages with tags (`audit.messages.TAGGED`)."""
        found = np.frombuffer(packed, TAGGED)
        self._sequences.append(found["sequence"].astype(np.int64))
        self._tags.append(found["tags"].astype(np.int64))

    def forget(self, group: str, consumer: str, epoch: Epoch) -> None:
        """Forget a consumer that left or changed its filter; without a name, all consumers of the group."""
        gone = [(group, consumer, epoch)] if consumer else [key for key in self._got if key[0] == group]
        for key in gone:
            self._got.pop(key, None)
            self._open.pop(key, None)

    def pull(self, frame: Frame, progress: Progress, first: int, position: int) -> Iterator[Complaint]:
        """Take a pull; yield complaints about messages that it or an earlier pull passed over without reason.

        `first`: first sequence of the subject in the log. `position`: position of the group before this pull.
        Redelivered messages before the position do not reveal the filter: the next consumer gets candidates for dead
        letters regardless of its filter.
        """
        if not self.is_known:
            return
        got: list[Range] = []
        passed: list[Range] = []
        for number, sequence, messages in progress.entries:
            begin, end = max(sequence, first), sequence + messages
            if begin >= end or number in (DEFERRED, EXPIRED, OVERFLOWED):
                continue
            if number == PASSED:
                passed.append((begin, end))
            elif sequence >= position:
                got.append((begin, end))
        key = progress.group, progress.consumer, frame.epoch
        if passed or (got and key in self._open):
            yield from self._compare(key, frame, got, passed)
        if got:
            self._got[key] = got

    def _compare(self, key: Key, frame: Frame, got: list[Range], passed: list[Range]) -> Iterator[Complaint]:
        """Compare passed-over messages with those delivered by this pull, the one before and the one after."""
        delivered = self._tags_of(got)
        before = self._tags_of(self._got.get(key, ()))
        waiting = self._open.pop(key, []) if delivered else []
        for begin, end in passed:
            passed_over = _Passed(frame, begin, end - begin, self._tags_of([(begin, end)]))
            if _selects(delivered, passed_over.tags):
                yield _complain(passed_over)
            elif _selects(before, passed_over.tags) and not delivered:
                self._open.setdefault(key, []).append(passed_over)
        for passed_over in waiting:
            if _selects(delivered, passed_over.tags):
                yield _complain(passed_over)

    def _tags_of(self, ranges: Iterable[Range]) -> frozenset[int]:
        """Return the tags of the messages in these ranges, as hashes."""
        return frozenset().union(*(self._tags_in(begin, end) for begin, end in ranges))

    def _tags_in(self, begin: int, end: int) -> set[int]:
        tagged, found = 0, set()
        for sequences, tags in zip(reversed(self._sequences), reversed(self._tags)):
            if sequences[0] >= end:
                continue
            if sequences[-1] < begin:
                break
            some = tags[np.searchsorted(sequences, begin) : np.searchsorted(sequences, end)]
            tagged += len(some)
            found.update(np.unique(some).tolist())
        return found | ({UNTAGGED} if tagged < end - begin else set())


def _selects(got: frozenset[int], tags: frozenset[int]) -> bool:
    """Return whether a consumer that got messages with the tags `got` also gets some with `tags`."""
    return bool(tags) and (UNTAGGED in got or not got.isdisjoint(tags))


def _complain(passed_over: _Passed) -> Complaint:
    text = (
        f"{passed_over.messages} messages from sequence {passed_over.begin} on were passed over; "
        "the consumer gets such messages"
    )
    return Complaint(FindingKind.PASSED, text, passed_over.begin, passed_over.frame.offset, passed_over.frame.end)
