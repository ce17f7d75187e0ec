"""Core. What a delay server planned and did, held against what it promises: never early, at most once, truly cancelled.

Facts of kind `delayed`, a row per message that a frame decides about, of one of these (`text`):

    dispatch    planned for a broker group: first: its number, last: when it was due, value: the master's clock then,
                chain: producer id, total: batch number
    gone        cancelled, or written again elsewhere under another number: first: its number
    stored      a batch was stored by its broker group: chain, total
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qmq.audit.headers import NUMBER_MAX
from qmq.audit.kinds import Kind
from qmq.audit.said import Said, finding
from qmq.codec import Buffer
from qmq.log.delays import Outcome, decode_dispatch, decode_places, decode_settled
from qmq.log.frame import Frame, FrameKind


def facts_of(frame: Frame, body: Buffer) -> Iterator[dict[str, Any]]:
    """Return what a frame of a delay server's log decides. Raises ValueError if its body makes no sense."""
    about: dict[str, Any] = {"kind": "delayed", "offset": frame.offset, "end": frame.end, "subject": frame.subject}
    if frame.kind == FrameKind.DISPATCH:
        numbers = {"value": frame.timestamp_ms, "chain": f"{frame.producer:016x}", "total": frame.batch}
        for number, due_ms in decode_dispatch(body, frame.count)[1]:
            yield about | numbers | {"text": "dispatch", "first": number, "last": due_ms}
    elif frame.kind == FrameKind.SETTLED:
        for producer, batch, outcome in decode_settled(body, frame.count):
            if outcome == Outcome.STORED:
                yield about | {"text": "stored", "chain": f"{producer:016x}", "total": batch}
    else:
        for number, _ in decode_places(body, frame.count):
            if number:  # else it stands in place of nothing
                yield about | {"text": "gone", "first": number}


class OfDelays:
    """Judges what a delay server decided about the messages whose numbers fall to it; takes lists of facts."""

    def __init__(self) -> None:
        self._planned: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._gone: dict[int, int] = {}
        """message's number -> where it was first cancelled, or written again"""
        self._stored: set[tuple[str, int]] = set()

    def take(self, piece: int, said: list[dict[str, Any]]) -> Iterator[Said]:
        for fact in said:
            if fact["text"] == "stored":
                self._stored.add((fact["chain"], fact["total"]))
            elif fact["text"] == "gone":
                self._gone.setdefault(fact["first"], fact["offset"])
            else:
                self._planned.setdefault((fact["subject"], fact["first"]), []).append(fact)
                if fact["value"] < fact["last"]:
                    yield _finding(fact, Kind.EARLY, f"planned {fact['last'] - fact['value']} ms before it was due")

    def finish(self) -> Iterator[Said]:
        for (_, number), planned in sorted(self._planned.items()):
            times = sum((one["chain"], one["total"]) in self._stored for one in planned)
            if times > 1:
                yield _finding(planned[-1], Kind.TWICE, f"stored in {times} batches")
            gone = self._gone.get(number)
            for one in planned:
                if gone is not None and one["offset"] > gone:
                    yield _finding(one, Kind.RECALLED, f"planned after it was cancelled or written again at {gone}")


def _finding(fact: dict[str, Any], what: Kind, text: str) -> Said:
    """`sequence` is the message's number: the offset at which it lies."""
    fields = {name: fact[name] for name in ("offset", "end", "subject")}
    return finding(what, text, sequence=min(fact["first"], NUMBER_MAX), **fields)


def spread_delayed(facts: list[dict[str, Any]], buckets: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Return the facts of a piece for `OfDelays` by bucket: by a message's number, those of batches in each."""
    for bucket in range(buckets if facts else 0):
        yield bucket, [one for one in facts if one["text"] == "stored" or one["first"] % buckets == bucket]
