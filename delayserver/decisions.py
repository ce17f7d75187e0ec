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
from qmq.delayserver.messages import Records, with_due
from qmq.delayserver.templates import LABEL
from qmq.log import delay_frames
from qmq.log.delay_frames import Settlement
from qmq.log.frame import Frame, FrameKind, label_flags
from qmq.replication.mastership import Mastership
from qmq.server.producing import ProduceCounters

LATENESS_MS_BUCKETS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000, 600_000)


@dataclass(slots=True)
class Counters(ProduceCounters):
    sent_messages: int = 0
    sent_batches: int = 0
    not_stored_batches: int = 0
    """Batches that a broker group certainly did not store; their messages were due again."""
    unknown_answers: int = 0
    """Attempts after which nobody knew; the same batch was repeated."""
    refused_messages_later: int = 0
    """Messages that a broker never takes as they are; they are tried again much later."""
    cancelled_messages: int = 0
    rescheduled_messages: int = 0
    carried_messages: int = 0
    recurred_messages: int = 0
    """Occurrences of recurring schedules."""
    skipped_occurrences: int = 0
    """Those that were missed while nobody was there, and are not sent."""
    lateness_ms_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_MS_BUCKETS) + 1))
    """Messages sent, by time from due until stored; the last place is for those later than every bucket."""
    lateness_ms_sum: int = 0


class Recurrence(NamedTuple):
    """A template, when it is due next, and what it sends now."""

    template: bytes
    next_ms: int
    occurrence: bytes
    label: int


class Decisions:
    """Made by the master; ends with the mastership."""

    def __init__(self, mastership: Mastership) -> None:
        self._mastership = mastership
        self._unfiled: deque[tuple[int, list[int]]] = deque()
        self._named: set[int] = set()
        self._derived: dict[int, tuple[int, int]] = {}
        """What follows from another message: number -> (own end, end of the message it follows from)."""
        self._safe = 0
        self.moved_end = 0
        """End of the last frame of this mastership that writes messages in place of others."""
        self._templates_end: dict[str, int] = {}

    def templates_end(self, subject: str) -> int:
        """Return the end of the last frame of this mastership that changes recurring schedules of the subject."""
        return self._templates_end.get(subject, 0)

    def names(self, number: int) -> bool:
        """Return whether a frame that the schedule does not have yet decides about the message."""
        return number in self._named

    def not_named(self, records: Records) -> Records:
        """Return those of `records` that no unfiled frame decides about."""
        if self._named:
            records = records[[number not in self._named for number in records["number"].tolist()]]
        return records

    def filed(self, end: int) -> None:
        """The schedule has all frames before `end`."""
        while self._unfiled and self._unfiled[0][0] <= end:
            self._named.difference_update(self._unfiled.popleft()[1])
        safe = self._mastership.gate.high_watermark
        if self._derived and safe > self._safe:
            self._safe = safe
            self._derived = {number: ends for number, ends in self._derived.items() if ends[0] > safe}

    def data_end(self, records: Records) -> int:
        """Return before which place of the log lies all that nobody could make anew from what lies before it."""
        ends = records["number"] + records["size"]
        if not self._derived:
            return int(ends.max())
        numbers = zip(records["number"].tolist(), ends.tolist())
        return max(self._derived[number][1] if number in self._derived else end for number, end in numbers)

    def is_with_both(self, records: Records) -> npt.NDArray[np.bool_]:
        """Return which of these messages both copies have, or could make anew from what they have."""
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
        """These messages go to `group` as one batch, under these numbers."""
        body = delay_frames.encode_dispatch(group, _places_of(records))
        frame = self._mastership.append(
            FrameKind.DISPATCH, subject, body, count=len(records), producer=producer, batch=batch
        )
        return self._note(frame, records)

    def settle(self, settled: Sequence[Settlement]) -> Frame:
        """These batches were stored, or were not."""
        return self._mastership.append(FrameKind.SETTLED, "", delay_frames.encode_settled(settled), count=len(settled))

    def cancel(self, subject: str, records: Records) -> Frame:
        """These messages are not sent any more."""
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
        """Messages of one subject once more, in place of `records`: due when they were, or at `dues`.

        Those that are in flight are replaced by what settles their batch: then `replaces` is false.
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
        """Recurring schedules of a subject are due: their occurrences, and `records` themselves for the next time.

        One frame, so that there are both or none. If it is lost with the only copy that has it, the other copy makes it
        anew from what `records` follow from; so both are as safe as that.
        """
        count, places = len(records), _places_of(records) + bytes(delay_frames.PLACE_BYTES * len(records))
        data_ends = [self.data_end(records[at : at + 1]) for at in range(count)]
        messages = [with_due(one.template, one.next_ms) for one in recurrences]
        messages += [one.occurrence for one in recurrences]
        labels = records["label"].tolist() + [one.label for one in recurrences]
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
        """A new template, in place of those `records`, of which there is one at most."""
        places = _places_of(records) if len(records) else bytes(delay_frames.PLACE_BYTES)
        body = join_batch([with_due(template, due_ms)])
        frame = self._mastership.append(
            FrameKind.CARRY, subject, places + body + encode_labels([LABEL]), flags=label_flags([LABEL]), count=1
        )
        self._templates_end[subject] = frame.end
        return self._note(frame, records)


def _places_of(records: Records) -> bytes:
    """Return (number, due time) of each record, as they stand in frames."""
    return np.column_stack((records["number"], records["due"])).astype("<u8").tobytes()
