"""Core. What is known of messages frames without looking into each message: their labels, and bodies just read.

A frame in the log's tail is looked at where it lies. Of others, labels and bodies are read elsewhere (`read_sight`, on
a thread) and kept here for a while, both within bounds: the least recently used go first, but never what came last, so
that whoever waits for it gets on.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from broker.tags import TagRule
from qmq.codec import Buffer, decode_labels
from qmq.log import MessageLog
from qmq.log.frame import FLAG_LABELLED, Frame
from qmq.log.index import FrameRef

LABEL_BYTES_MAX = 16 << 20
BODY_BYTES_MAX = 32 << 20
ENTRY_BYTES = 200
"""What a frame's labels count for beside their bytes."""
READ_BYTES_MAX = 8 << 20
"""Bodies in one reading; a larger frame comes alone."""

NO_LABELS = array("Q")
"""Of a frame without a label section: no order keys, and tags are read from its messages."""

Body = tuple[Frame, Buffer]
T = TypeVar("T")


class Sight(NamedTuple):
    """What a reading found, by offset of the frame."""

    labels: dict[int, array[int]]
    bodies: dict[int, Body]


def read_sight(log: MessageLog, refs: Sequence[FrameRef], rule: TagRule | None) -> Sight:
    """Read labels, and under a rule the bodies that may hold a match, as many as one reading takes. Blocks.

    Raises:
        CorruptFrame: this copy is damaged there.
    """
    labels = dict(zip((ref.offset for ref in refs), log.read_labels(refs), strict=True))
    wanted: list[FrameRef] = []
    size = 0
    for ref in refs:
        found = labels[ref.offset]
        if rule is not None and (not found or rule.candidates(found, 0, len(found))):
            size += ref.length
            if wanted and size > READ_BYTES_MAX:
                break
            wanted.append(ref)
    return Sight(labels, {frame.offset: (frame, body) for frame, body in log.read_bodies(wanted)})


class Sights:
    """One for all groups of a broker; ends with the reign."""

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._labels: _Recent[array[int]] = _Recent(LABEL_BYTES_MAX)
        self._bodies: _Recent[Body] = _Recent(BODY_BYTES_MAX)

    def took(self, sight: Sight) -> None:
        self._labels.add({at: (found, 8 * len(found) + ENTRY_BYTES) for at, found in sight.labels.items()})
        self._bodies.add({at: (found, len(found[1])) for at, found in sight.bodies.items()})

    def labels(self, ref: FrameRef) -> array[int] | None:
        """Return the labels of the frame's messages; None: they have to be read."""
        if (found := self._log.tail_body(ref.offset)) is None:
            return self._labels.get(ref.offset)
        return labels_of(*found)

    def body(self, ref: FrameRef) -> Body | None:
        """Return the frame; None: it has to be read."""
        return self._log.tail_body(ref.offset) or self._bodies.get(ref.offset)

    def is_on_disk(self, ref: FrameRef) -> bool:
        """Return whether a reading may be asked for it: what the tail has may not be written yet."""
        return self._log.tail_body(ref.offset) is None


def labels_of(frame: Frame, body: Buffer) -> array[int]:
    """Return the labels of a whole frame."""
    if frame.flags & FLAG_LABELLED:
        with contextlib.suppress(ValueError):  # they were wrong when they came; what is whole is no damage
            return decode_labels(body, frame.count)
    return NO_LABELS


class _Recent(Generic[T]):
    """What was used last, up to a number of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[int, tuple[T, int]] = OrderedDict()

    def get(self, offset: int) -> T | None:
        found = self._kept.get(offset)
        if found is None:
            return None
        self._kept.move_to_end(offset)
        return found[0]

    def add(self, values: dict[int, tuple[T, int]]) -> None:
        """Keep all of these, and of the others as many as fit."""
        for offset, value in values.items():
            self._bytes += value[1] - self._kept.pop(offset, (None, 0))[1]
            self._kept[offset] = value
        while self._bytes > self._bytes_max and len(self._kept) > len(values):
            self._bytes -= self._kept.popitem(last=False)[1][1]
