"""Core. Frames that decide about messages: planned for a broker group, settled, cancelled, written again.

What a frame decides counts from the moment in which it is written, although the schedule follows only when it is on
disk; until then `names` knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delayserver import frames
from delayserver.due import with_due
from delayserver.frames import Settlement
from delayserver.messages import Records
from qmq.codec import encode_labels, join_batch
from qmq.log.frame import Frame, FrameKind, label_flags
from qmq.replication.reign import Reign


class Decisions:
    """Made by the master; ends with the reign."""

    def __init__(self, reign: Reign) -> None:
        self._reign = reign
        self._unfiled: deque[tuple[int, list[int]]] = deque()
        self._named: set[int] = set()

    def names(self, number: int) -> bool:
        """Return whether a frame that the schedule does not have yet decides about the message."""
        return number in self._named

    def not_named(self, records: Records) -> Records:
        """Return those of `records` that no unfiled frame decides about."""
        if self._named:
            records = records[[number not in self._named for number in records["number"].tolist()]]
        return records

    def data_end(self, records: Records) -> int:
        """Return before which place of the log all of these messages lie."""
        return int((records["number"] + records["size"]).max())

    def is_with_both(self, records: Records) -> npt.NDArray[np.bool_]:
        """Return which of these messages both copies have."""
        high = np.uint64(self._reign.gate.high_watermark)
        with_both: npt.NDArray[np.bool_] = records["number"] + records["size"] <= high
        return with_both

    def filed(self, end: int) -> None:
        """The schedule has all frames before `end`."""
        while self._unfiled and self._unfiled[0][0] <= end:
            self._named.difference_update(self._unfiled.popleft()[1])

    def _note(self, frame: Frame, records: Records) -> Frame:
        numbers = records["number"].tolist()
        self._unfiled.append((frame.end, numbers))
        self._named.update(numbers)
        return frame

    def dispatch(self, subject: str, group: str, records: Records, *, producer: int, batch: int) -> Frame:
        """These messages go to `group` as one batch, under these numbers."""
        body = frames.encode_dispatch(group, _places_of(records))
        frame = self._reign.append(
            FrameKind.DISPATCH, subject, body, count=len(records), producer=producer, batch=batch
        )
        return self._note(frame, records)

    def settle(self, settled: Sequence[Settlement]) -> Frame:
        """These batches were stored, or were not."""
        return self._reign.append(FrameKind.SETTLED, "", frames.encode_settled(settled), count=len(settled))

    def cancel(self, subject: str, records: Records) -> Frame:
        """These messages are not sent any more."""
        frame = self._reign.append(FrameKind.CANCEL, subject, _places_of(records), count=len(records))
        return self._note(frame, records)

    def carry(
        self, subject: str, records: Records, messages: Sequence[bytes], dues: Sequence[int] | None = None, *,
        replaces: bool = True,
    ) -> Frame:  # fmt: skip
        """Messages of one subject once more, in place of `records`: due when they were, or at `dues`.

        Those that are in flight are replaced by what settles their batch: then `replaces` is false.
        """
        if dues is not None:
            messages = [with_due(message, due) for message, due in zip(messages, dues)]
        body, labels, flags = join_batch(messages), records["label"].tolist(), 0
        if any(labels):
            body, flags = body + encode_labels(labels), label_flags(labels)
        places = _places_of(records) if replaces else bytes(frames.PLACE_BYTES * len(records))
        frame = self._reign.append(FrameKind.CARRY, subject, places + body, flags=flags, count=len(messages))
        return self._note(frame, records)


def _places_of(records: Records) -> bytes:
    """Return (number, due time) of each record, as they stand in frames."""
    return np.column_stack((records["number"], records["due"])).astype("<u8").tobytes()
