"""Core. Frames of decisions: dispatched, settled, cancelled, carried, recurred; and the master's counters.

A decision counts from the moment its frame is written. The schedule files the frame only when it is on disk; until then
`Decisions.names` covers it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.codec import encode_labels, join_batch
from qmq.delayserver.schedule.record import Records, with_due
from qmq.delayserver.templates import LABEL
from qmq.log import delay_frames
from qmq.log.delay_frames import Settlement
from qmq.log.frame import Frame, FrameKind, label_flags
from qmq.replication.mastership import Mastership
from qmq.server.producing import ProduceCounters

LATENESS_MS_BUCKETS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000, 600_000)


@dataclass(slots=True)
class Counters(ProduceCounters):
    """Counts of one process for its metrics; they outlive masterships."""

    sent_messages: int = 0
    sent_batches: int = 0
    not_stored_batches: int = 0
    """Batches that a broker group surely did not store; their messages became due again."""
    unknown_answers: int = 0
    """Attempts with unknown outcome; the same batch was repeated."""
    refused_messages_later: int = 0
    """Messages that brokers refuse as they are; tried again much later."""
    cancelled_messages: int = 0
    rescheduled_messages: int = 0
    carried_messages: int = 0
    recurred_messages: int = 0
    """Occurrences of recurring schedules."""
    skipped_occurrences: int = 0
    """Occurrences missed during an outage, which are not sent."""
    lateness_ms_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_MS_BUCKETS) + 1))
    """Sent messages by time from due to stored; the last place is above every bucket."""
    lateness_ms_sum: int = 0


class Recurrence(NamedTuple):
    """A template, its next due time, and the message to send now."""

    template: bytes
    next_ms: int
    occurrence: bytes
    label: int


class Decisions:
    """Writer of decision frames. Made by the master; ends with the mastership."""

    def __init__(self, mastership: Mastership) -> None:
        self._mastership = mastership
        self._unfiled: deque[tuple[int, list[int]]] = deque()
        self._named: set[int] = set()
        self._derived: dict[int, tuple[int, int]] = {}
        """Messages that follow from another: number -> (own end, end of the message they follow from)."""
        self._safe = 0
        self.moved_end = 0
        """End of the last frame of this mastership that moves messages."""
        self._templates_end: dict[str, int] = {}

    def templates_end(self, subject: str) -> int:
        """Return the end of the last frame of this mastership that changes recurring schedules of the subject."""
        return self._templates_end.get(subject, 0)

    def names(self, number: int) -> bool:
        """Return whether an unfiled frame decides about the message."""
        return number in self._named

    def not_named(self, records: Records) -> Records:
        """Return those of `records` that no unfiled frame decides about."""
        if self._named:
            records = records[[number not in self._named for number in records["number"].tolist()]]
        return records

    def filed(self, end: int) -> None:
        """Note that the schedule contains all frames before `end`."""
        while self._unfiled and self._unfiled[0][0] <= end:
            self._named.difference_update(self._unfiled.popleft()[1])
        safe = self._mastership.gate.high_watermark
        if self._derived and safe > self._safe:
            self._safe = safe
            self._derived = {number: ends for number, ends in self._derived.items() if ends[0] > safe}

    def data_end(self, records: Records) -> int:
        """Return the offset both copies must have to be able to restore these messages."""
        ends = records["number"] + records["size"]
        if not self._derived:
            return int(ends.max())
        numbers = zip(records["number"].tolist(), ends.tolist())
        return max(self._derived[number][1] if number in self._derived else end for number, end in numbers)

    def is_with_both(self, records: Records) -> npt.NDArray[np.bool_]:
        """Return which of these messages both copies have or can derive."""
        high = self._mastership.gate.high_watermark
        with_both: npt.NDArray[np.bool_] = records["number"] + records["size"] <= np.uint64(high)
        if self._derived and not with_both.all():
            ends = (self._derived.get(number, (0, high + 1))[1] for number in records["number"][~with_both].tolist())
            with_both[~with_both] = [end <= high for end in ends]
        return with_both

    def _note(self, frame: Frame, records: Records) -> Frame:
        numbers = records["number"].tolist()
        if frame.kind == FrameKind.CARRY:
            self.moved_end = frame.end
        if frame.kind != FrameKind.DISPATCH and (records["label"] == LABEL).any():
            self._templates_end[frame.subject] = frame.end
        self._unfiled.append((frame.end, numbers))
        self._named.update(numbers)
        return frame

    def dispatch(self, subject: str, group: str, records: Records, *, producer: int, batch: int) -> Frame:
        """Write a dispatch of these messages to `group` as one batch with these numbers."""
        body = delay_frames.encode_dispatch(group, _places_of(records))
        frame = self._mastership.append(
            FrameKind.DISPATCH, subject, body, count=len(records), producer=producer, batch=batch
        )
        return self._note(frame, records)

    def settle(self, settled: Sequence[Settlement]) -> Frame:
        """Write the outcomes of batches."""
        return self._mastership.append(FrameKind.SETTLED, "", delay_frames.encode_settled(settled), count=len(settled))

    def cancel(self, subject: str, records: Records) -> Frame:
        """Write a cancel of these messages."""
        frame = self._mastership.append(FrameKind.CANCEL, subject, _places_of(records), count=len(records))
        return self._note(frame, records)

    def carry(
        self,
        subject: str,
        records: Records,
        messages: Sequence[bytes],
        dues: Sequence[int] | None = None,
        *,
        replaces: bool = True,
    ) -> Frame:
        """Write messages of one subject again, in place of `records`, with their due times or with `dues`.

        `replaces` is False for messages in flight: the settled frame of their batch replaces those.
        """
        if dues is not None:
            messages = [with_due(message, due) for message, due in zip(messages, dues)]
        body, labels, flags = join_batch(messages), records["label"].tolist(), 0
        if any(labels):
            body, flags = body + encode_labels(labels), label_flags(labels)
        places = _places_of(records) if replaces else bytes(delay_frames.PLACE_BYTES * len(records))
        frame = self._mastership.append(FrameKind.CARRY, subject, places + body, flags=flags, count=len(messages))
        return self._note(frame, records)

    def recur(self, subject: str, records: Records, recurrences: Sequence[Recurrence]) -> Frame:
        """Write occurrences of due recurring schedules, and `records` again for their next times.

        One frame holds both, so a crash leaves both or none. If a lost copy alone had the frame, the other copy makes
        it again from the messages that `records` were made from. So occurrences and templates are as safe as those.
        """
        count, places = len(records), _places_of(records) + bytes(delay_frames.PLACE_BYTES * len(records))
        data_ends = [self.data_end(records[at : at + 1]) for at in range(count)]
        messages = [with_due(recurrence.template, recurrence.next_ms) for recurrence in recurrences]
        messages += [recurrence.occurrence for recurrence in recurrences]
        labels = records["label"].tolist() + [recurrence.label for recurrence in recurrences]
        body = places + join_batch(messages) + encode_labels(labels)
        frame = self._mastership.append(FrameKind.CARRY, subject, body, flags=label_flags(labels), count=len(messages))
        for number in records["number"].tolist():
            self._derived.pop(number, None)
        at = frame.offset + frame.body_at + len(places) + 4 * (len(messages) + 1)
        for message, data_end in zip(messages, data_ends * 2):
            self._derived[at] = at + len(message), data_end
            at += len(message)
        return self._note(frame, records)

    def template(self, subject: str, records: Records, template: bytes, due_ms: int) -> Frame:
        """Write a template in place of `records`, which has at most one entry."""
        places = _places_of(records) if len(records) else bytes(delay_frames.PLACE_BYTES)
        body = join_batch([with_due(template, due_ms)])
        frame = self._mastership.append(
            FrameKind.CARRY, subject, places + body + encode_labels([LABEL]), flags=label_flags([LABEL]), count=1
        )
        self._templates_end[subject] = frame.end
        return self._note(frame, records)


def _places_of(records: Records) -> bytes:
    """Return (number, due time) of each record as stored in frames."""
    return np.column_stack((records["number"], records["due"])).astype("<u8").tobytes()
