"""Core. Choice of the dead letters that return to their group, and their encoding.

A dead letter is the original message plus properties that describe its failure. It returns without these properties, as
the original bytes with the original id, so a consumer that remembers ids handles it once, however often it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qmq.codec import decode_envelope, decode_properties, label_of, split_batch, with_properties
from qmq.dead_letters import FATE, GROUP, REASON, SUBJECT
from qmq.errors import InvalidMessage
from qmq.message import EXPIRES_AFTER, ORDER_KEY, TIMES
from qmq.remoting.commands import FLAG_IS_DEAD, Piece


@dataclass(frozen=True, slots=True)
class Chosen:
    """Dead letter that was chosen. `sequence` is that of the dead letter, `data` the bytes to send."""

    broker_group: str
    pull_sequence: int
    sequence: int
    id: str
    times: str
    reason: str
    data: bytes = field(repr=False)
    label: int

    def json(self, **more: Any) -> dict[str, Any]:
        shown = {"id": self.id, "brokerGroup": self.broker_group, "sequence": self.sequence}
        return shown | {"times": self.times, "deadReason": self.reason} | more


@dataclass(frozen=True, slots=True)
class Choice:
    """Filter for dead letters; empty fields match all."""

    id: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    reason: str = ""
    owner: tuple[str, str] | None = None
    """Subject and consumer group, for a subject shared with other dead letters and ordinary messages."""

    def of(self, broker_group: str, pieces: Iterable[Piece], bounds: tuple[int, int]) -> Iterator[Chosen]:
        """Choose from delivered messages within `bounds`: sequences `[begin, end)`."""
        for piece in pieces:
            for at, data in enumerate(split_batch(piece.body, piece.count)):
                sequence = piece.sequence + at
                if bounds[0] <= sequence < bounds[1]:
                    chosen = self._chosen(broker_group, piece.pull_sequence + at, sequence, bytes(data))
                    if chosen is not None and (self.owner is None or piece.flags & FLAG_IS_DEAD):
                        yield chosen

    def _chosen(self, broker_group: str, pull_sequence: int, sequence: int, data: bytes) -> Chosen | None:
        try:
            envelope = decode_envelope(data)
            properties = decode_properties(data)
        except InvalidMessage:
            return None  # no consumer could handle it next time either
        if (
            self.id not in ("", envelope.id)
            or not self.tags <= set(envelope.tags)
            or not self.properties.items() <= properties.items()
            or self.reason not in properties.get(REASON, "")
            or self.owner not in (None, (properties.get(SUBJECT), properties.get(GROUP)))
        ):
            return None
        return Chosen(
            broker_group,
            pull_sequence,
            sequence,
            envelope.id,
            properties.get(TIMES, ""),
            properties.get(REASON, ""),
            without_fate(data, properties),
            label_of(envelope.tags, properties.get(ORDER_KEY)),
        )


def without_fate(data: bytes, properties: Mapping[str, str]) -> bytes:
    """Return an encoded message with these properties as it was before it became a dead letter."""
    fate = FATE if properties.get(EXPIRES_AFTER) else (*FATE, EXPIRES_AFTER)
    return with_properties(data, {}, without=fate)


def batches_of(chosen: Sequence[Chosen], *, messages_max: int, bytes_max: int) -> Iterator[Sequence[Chosen]]:
    """Split dead letters into batches of limited messages and bytes; a larger message is a batch of its own."""
    begin = size = 0
    for at, letter in enumerate(chosen):
        if at > begin and (at - begin >= messages_max or size + len(letter.data) > bytes_max):
            yield chosen[begin:at]
            begin, size = at, 0
        size += len(letter.data)
    if begin < len(chosen):
        yield chosen[begin:]


def ranges_of(letters: Iterable[Chosen]) -> list[tuple[int, int]]:
    """Return the ascending pull sequences of `letters` as ranges."""
    ranges: list[tuple[int, int]] = []
    for letter in letters:
        if ranges and ranges[-1][1] == letter.pull_sequence:
            ranges[-1] = ranges[-1][0], letter.pull_sequence + 1
        else:
            ranges.append((letter.pull_sequence, letter.pull_sequence + 1))
    return ranges


def others_of(pieces: Iterable[Piece], chosen: Iterable[Chosen]) -> list[tuple[int, int]]:
    """Return the pull sequences that were delivered and not chosen, as ranges; both ascend."""
    borders = iter([letter.pull_sequence for letter in chosen])
    others: list[tuple[int, int]] = []
    border = next(borders, None)
    for piece in pieces:
        begin, end = piece.pull_sequence, piece.pull_sequence + piece.count
        while border is not None and border < end:
            if begin < border:
                others.append((begin, border))
            begin, border = border + 1, next(borders, None)
        if begin < end:
            others.append((begin, end))
    return others


@dataclass(slots=True)
class Receipt:
    """Outcome of the chosen dead letters."""

    subject: str
    group: str
    to: str = ""
    """Destination subject; empty for their consumer group."""
    looked_at: int = 0
    moved: list[dict[str, Any]] = field(default_factory=list)
    """Messages at their destination, each with its sequence there."""
    unknown: list[dict[str, Any]] = field(default_factory=list)
    """Messages that were sent, or moved while the dead letter may still exist. Another Redrive may move them again."""
    left: list[dict[str, Any]] = field(default_factory=list)
    """Messages that are still dead letters, each with the reason."""
    unasked: dict[str, str] = field(default_factory=dict)
    """Broker groups that did not answer."""

    @property
    def goes_to(self) -> str:
        return f"to {self.to}" if self.to else f"back to {self.group}"

    def json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "group": self.group,
            "to": self.to,
            "deadLetters": self.looked_at,
            "moved": self.moved,
            "unknown": self.unknown,
            "left": self.left,
            "unasked": self.unasked,
        }
