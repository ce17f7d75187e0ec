"""Core. What is known of messages frames without looking into each message: their labels, and bodies just read.

A frame in the log's tail is looked at where it lies. Of others, labels and bodies are read on a thread
(`read_labels_of`) and kept here for a while, both within bounds: the least recently used go first, but never what came
last, so that whoever waits for it gets on.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from qmq.broker.tags import TagRule
from qmq.codec import Buffer, decode_labels
from qmq.log import MessageLog
from qmq.log.frame import FLAG_LABELLED, Frame
from qmq.log.index import FrameRef

LABEL_BYTES_MAX = 16 << 20
BODY_BYTES_MAX = 32 << 20
"""Over all groups. What one reading found may be more, and stays until the next one."""
ENTRY_BYTES = 200
"""What a frame's labels count for beside their bytes."""
READ_BYTES_MAX = 16 << 20
"""Bodies read at once; a larger frame comes alone."""

NO_LABELS = array("Q")
"""Of a frame without a label section: no order keys, and tags are read from its messages."""

Body = tuple[Frame, Buffer]
ENDS = struct.Struct("<II")
"""Where a message of a batch begins and ends (qmq.codec)."""
K = TypeVar("K")
T = TypeVar("T")


class LabelsRead(NamedTuple):
    """What a reading found, by offset of the frame."""

    rule: TagRule | None
    labels: dict[int, array[int]]
    bodies: dict[int, Body]
    """Under a rule. What does not match it is left out: it is a message of no bytes there."""


def read_labels_of(log: MessageLog, refs: Sequence[FrameRef], rule: TagRule | None) -> LabelsRead:
    """Read labels, and under a rule what matches in as many frames as one reading takes. Blocks.

    Frames are read one by one: memory that was just used costs half of what 8 MiB of fresh memory cost.

    Raises:
        CorruptFrame: this copy is damaged there.
    """
    labels = dict(zip((ref.offset for ref in refs), log.read_labels(refs), strict=True))
    bodies: dict[int, Body] = {}
    size = 0
    for ref in refs if rule is not None else ():
        assert rule is not None
        found = labels[ref.offset]
        count = ref.end - ref.begin
        if places := rule.candidates(found, 0, count) if found else range(count):
            size += ref.length
            if bodies and size > READ_BYTES_MAX:
                break
            ((frame, body),) = log.read_bodies([ref])
            bodies[ref.offset] = frame, _without_others(rule, body, count, places)
    return LabelsRead(rule, labels, bodies)


def _without_others(rule: TagRule, body: Buffer, count: int, places: Sequence[int]) -> Buffer:
    """Return a batch of as many messages, of which only those at `places` that match have their bytes."""
    view, base = memoryview(body), 4 * (count + 1)
    ends, kept, size = array("I"), [], 0
    for place in places:
        at, to = ENDS.unpack_from(view, 4 * place)
        if rule.matches(message := bytes(view[base + at : base + to])):
            ends += array("I", (size,)) * (place + 1 - len(ends))
            kept.append(message)
            size += len(message)
    if len(kept) == count:
        return body
    ends += array("I", (size,)) * (count + 1 - len(ends))
    return b"".join((ends.tobytes(), *kept))


class LabelCache:
    """One for all groups of a broker; ends with the mastership."""

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._labels: _Recent[int, array[int]] = _Recent(LABEL_BYTES_MAX)
        self._bodies: _Recent[tuple[int, TagRule | None], Body] = _Recent(BODY_BYTES_MAX)

    def took(self, read: LabelsRead) -> None:
        self._labels.add({at: (found, 8 * len(found) + ENTRY_BYTES) for at, found in read.labels.items()})
        self._bodies.add({(at, read.rule): (found, len(found[1])) for at, found in read.bodies.items()})

    def labels(self, ref: FrameRef) -> array[int] | None:
        """Return the labels of the frame's messages; None: they have to be read."""
        if (found := self._log.tail_body(ref.offset)) is None:
            return self._labels.get(ref.offset)
        return labels_of(*found)

    def body(self, ref: FrameRef, rule: TagRule) -> Body | None:
        """Return the frame with what matches `rule`, perhaps with more; None: it has to be read."""
        return self._log.tail_body(ref.offset) or self._bodies.get((ref.offset, rule))

    def is_on_disk(self, ref: FrameRef) -> bool:
        """Return whether a reading may be asked for it: what the tail has may not be written yet."""
        return self._log.tail_body(ref.offset) is None


def labels_of(frame: Frame, body: Buffer) -> array[int]:
    """Return the labels of a whole frame."""
    if frame.flags & FLAG_LABELLED:
        with contextlib.suppress(ValueError):  # they were wrong when they came; what is whole is no damage
            return decode_labels(body, frame.count)
    return NO_LABELS


class _Recent(Generic[K, T]):
    """What was used last, up to a number of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[K, tuple[T, int]] = OrderedDict()

    def get(self, key: K) -> T | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def add(self, values: dict[K, tuple[T, int]]) -> None:
        """Keep all of these, and of the others as many as fit."""
        for key, value in values.items():
            self._bytes += value[1] - self._kept.pop(key, (None, 0))[1]
            self._kept[key] = value
        while self._bytes > self._bytes_max and len(self._kept) > len(values):
            self._bytes -= self._kept.popitem(last=False)[1][1]
