"""Core. Retention frames: the agreed begin of a log. No single clock decides a deletion.

The master writes a retention frame when the clocks of all copies and of the metaserver agree. Copies delete whole
segments only because of such a frame. Its timestamp is the agreed time. Its body is JSON, padded with blanks to a
multiple of 8:

    start        offset from which frames are kept; unchanged in a frame that only states the time
    rule         "age" or "size": the reason for the deletion before `start`; empty without a deletion
    clocks       name of a clock -> ms that the master's was ahead of it
    unconsumed   [[subject, consumer group, messages]]: messages deleted before the group consumed them

A copy deletes only when the high watermark covers the frame, because unacknowledged frames may still be cut. For
readers the messages are gone once the frame is written.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from qmq.codec import Buffer
from qmq.log.frame import encode_json_body

Key = tuple[str, str]
"""(subject, consumer group)"""

_FIRST = itemgetter(0)


class RetentionDecision(NamedTuple):
    """Body of a retention frame."""

    start: int
    rule: str
    clocks: dict[str, int]
    unconsumed: dict[Key, int]


def encode_retention(decision: RetentionDecision) -> bytes:
    return encode_json_body(
        start=decision.start,
        rule=decision.rule,
        clocks=decision.clocks,
        unconsumed=[[*key, messages] for key, messages in sorted(decision.unconsumed.items())],
    )


def decode_retention(body: Buffer) -> RetentionDecision:
    """Read a body after its CRC was checked; raises ValueError if its fields do not fit."""
    try:
        fields = json.loads(bytes(body))
        lost = {(str(subject), str(group)): int(messages) for subject, group, messages in fields["unconsumed"]}
        return RetentionDecision(int(fields["start"]), str(fields["rule"]), dict(fields["clocks"]), lost)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the body of a retention frame: {error}") from None


@dataclass(slots=True)
class Kept:
    """Joint content of the retention frames of a log's prefix. Part of the fold's state."""

    start: int = 0
    """Offset from which frames are kept."""
    decided_end: int = 0
    """End of the frame that decided `start`. A copy may delete once the high watermark is there."""
    times: list[tuple[int, int]] = field(default_factory=list)
    """(offset of a retention frame, agreed time), ascending: everything before that offset is older than that time."""
    unconsumed: dict[Key, int] = field(default_factory=dict)
    """Messages deleted before the consumer group consumed them, since the log's beginning."""

    def take(self, decision: RetentionDecision, *, offset: int, end: int, time_ms: int) -> None:
        """Add a frame. Raises ValueError if its start decreases, or lies behind the frame itself."""
        if not self.start <= decision.start <= offset:
            raise ValueError(f"frames are kept from {self.start} on, and are to be kept from {decision.start} on")
        if decision.start > self.start:
            self.start = decision.start
            self.decided_end = end
            self.times = [time for time in self.times if time[0] > decision.start]
        self.times.append((offset, time_ms))
        for key, messages in decision.unconsumed.items():
            self.unconsumed[key] = self.unconsumed.get(key, 0) + messages

    def written_before_ms(self, offset: int) -> int | None:
        """Return an agreed time before which everything below `offset` was written, or None if no frame states one."""
        at = bisect_left(self.times, offset, key=_FIRST)
        return self.times[at][1] if at < len(self.times) else None

    def agreed_start(self, high_watermark: int) -> int:
        """Return the offset before which copies may delete now."""
        return self.start if self.decided_end <= high_watermark else 0

    def to_json(self) -> dict[str, Any]:
        unconsumed = [[*key, messages] for key, messages in self.unconsumed.items()]
        return {"start": self.start, "decided_end": self.decided_end, "times": self.times, "unconsumed": unconsumed}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Kept:
        times = [(offset, time_ms) for offset, time_ms in fields["times"]]
        unconsumed = {(subject, group): messages for subject, group, messages in fields["unconsumed"]}
        return cls(fields["start"], fields["decided_end"], times, unconsumed)
