"""Core. What a log keeps, by its own frames: deleting is agreed on, and no clock alone decides it.

The master writes a retention frame when the clocks of all copies and of the metaserver agree, and copies delete whole
segments because of such a frame only. Its timestamp is the agreed time. Its body is JSON, padded with blanks to a
multiple of 8:

    start        offset from which frames are kept; the same as before in a frame that only states the time
    rule         "age" or "size": why what is before `start` goes; empty: nothing does
    clocks       whose clock was asked -> how many ms the master's was ahead of it
    unconsumed   [[subject, consumer group, messages]]: what goes although the group has not consumed it

A copy deletes when the high watermark covers the frame: what is not acknowledged may still be cut. To readers of
messages they are gone as soon as the frame is there.
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
    """The body of a retention frame."""

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
    """Read a body that a frame's CRC vouches for; raises ValueError if it says something else."""
    try:
        fields = json.loads(bytes(body))
        lost = {(str(subject), str(group)): int(messages) for subject, group, messages in fields["unconsumed"]}
        return RetentionDecision(int(fields["start"]), str(fields["rule"]), dict(fields["clocks"]), lost)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the body of a retention frame: {error}") from None


@dataclass(slots=True)
class Kept:
    """What the retention frames of a log's prefix say together. Part of the fold's state."""

    start: int = 0
    """Offset from which frames are kept."""
    decided_end: int = 0
    """End of the frame that said so; the copy may delete once the high watermark is there."""
    times: list[tuple[int, int]] = field(default_factory=list)
    """(offset of a retention frame, agreed time), ascending: everything before that offset was written before."""
    unconsumed: dict[Key, int] = field(default_factory=dict)
    """Messages that went although the consumer group had not consumed them, since the log's beginning."""

    def take(self, decision: RetentionDecision, *, offset: int, end: int, time_ms: int) -> None:
        """Take a frame in. Raises ValueError if it gives back what was given up, or gives up itself."""
        if not self.start <= decision.start <= offset:
            raise ValueError(f"frames are kept from {self.start} on, and are to be kept from {decision.start} on")
        if decision.start > self.start:
            self.start, self.decided_end = decision.start, end
            self.times = [time for time in self.times if time[0] > decision.start]
        self.times.append((offset, time_ms))
        for key, messages in decision.unconsumed.items():
            self.unconsumed[key] = self.unconsumed.get(key, 0) + messages

    def written_before_ms(self, offset: int) -> int | None:
        """Return an agreed time at which everything before `offset` was written; None: there was none since."""
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
