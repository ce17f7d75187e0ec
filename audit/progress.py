"""Core. Whether pulls, acks and positions follow from the log, decided by the fold that the brokers themselves use.

`qmq.log.fold.apply` says what a progress frame does and which one is impossible. It sees the frames of one subject
after the other here; what lies between them does not matter to it. Beyond the fold, a pull that hands out more
than the subject holds is named. Where a log begins behind its retention, a group that is older than the log is
taken as its first frame shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from qmq.errors import QmqError
from qmq.log.fold import Consumer, Group, State, apply
from qmq.log.frame import Frame, FrameKind, decode_header
from qmq.log.progress import Progress, decode_progress

FINDING_ROWS = pa.schema(
    [("what", pa.string()), ("copy", pa.string()), ("offset", pa.int64()), ("end", pa.int64()),
     ("subject", pa.string()), ("sequence", pa.int64()), ("id", pa.string()), ("text", pa.string())]
)  # fmt: skip


class Judge:
    """Folds the progress of one copy and subject after the other. Made per task; fed rows in order."""

    def __init__(self) -> None:
        self._of: tuple[str, str] | None = None
        self._state = State()
        self._subject_end: int | None = None
        self._given_up: set[str] = set()

    def judge(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Take a `run` or `progress` fact with `copy` and `start`, the log's; yield what is wrong with it."""
        if self._of != (row["copy"], row["subject"]):
            self._of, self._state, self._given_up = (row["copy"], row["subject"]), State(), set()
            self._subject_end = 0 if row["start"] == 0 else None
        if row["kind"] == "run":
            # It counts from its end on: a frame between its first and its last knows better, by `last`.
            self._subject_end = row["last"]
            return
        frame = decode_header(bytes.fromhex(row["header"]), 0, row["offset"], None)
        body = bytes.fromhex(row["body"])
        for text in self._complaints(frame, body, row):
            yield {
                "what": "progress", "copy": row["copy"], "offset": frame.offset, "end": frame.end,
                "subject": frame.subject, "sequence": None, "id": None, "text": text,
            }  # fmt: skip

    def _complaints(self, frame: Frame, body: bytes, row: dict[str, Any]) -> Iterator[str]:
        try:
            said = decode_progress(body)
        except ValueError as error:
            yield str(error)
            return
        name = f"group {said.group}" + (f", consumer {said.consumer}" if said.consumer else "")
        subject_end = row["last"] if row["last"] is not None else self._subject_end
        if frame.kind == FrameKind.PULL and subject_end is not None:
            for _, sequence, messages in said.entries:
                if sequence + messages > subject_end:
                    yield f"{name}: pulled to sequence {sequence + messages}, the subject ends at {subject_end}"
        if said.group in self._given_up and not (frame.kind == FrameKind.POSITION and not said.consumer):
            return
        if row["start"] != 0:
            self._learn(frame, said)
        try:
            self._state.end = frame.offset
            apply(self._state, frame, body)
            self._given_up.discard(said.group)
        except (QmqError, ValueError, LookupError) as error:
            self._given_up.add(said.group)
            yield f"{name}: {getattr(error, 'reason', error)}; the rest of this group is not judged"

    def _learn(self, frame: Frame, said: Progress) -> None:
        """Take over a group or a consumer that the log knew before it begins, as this frame shows it."""
        key = (frame.subject, said.group)
        group = self._state.groups.get(key)
        if group is None:
            if frame.kind == FrameKind.POSITION and not said.consumer:
                return
            begin = min((entry[1] for entry in said.entries), default=0) if frame.kind == FrameKind.PULL else 0
            group = self._state.groups[key] = Group(position=begin)
        if said.consumer and said.consumer not in group.consumers and frame.kind == FrameKind.ACK:
            begin, end, _ = said.entries[0]
            consumer = group.consumers[said.consumer] = Consumer(next_pull=end)
            consumer.unacked.append([begin, 0, end - begin])
