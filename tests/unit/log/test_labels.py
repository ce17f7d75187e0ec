"""Core. Labels at the end of a frame: damaged ones are detected, invalid ones are ignored."""

from __future__ import annotations

import pytest

from qmq.codec import encode_labels, join_batch, label_of
from qmq.errors import CorruptFrame
from qmq.log.frame import FLAG_LABELLED, FrameKind
from tests.unit.log.logs import Copy, message

LABELS = [label_of(["pay"], None), label_of([], "k1"), 0]


def a_log(section: bytes, flags: int = FLAG_LABELLED) -> Copy:
    copy = Copy.begun(segment_bytes=1 << 16, tail_bytes=0)
    for first in (0, 3):
        body = join_batch([message("s", f"m{first + at}") for at in range(3)]) + section
        copy.append(FrameKind.MESSAGES, "s", body, count=3, first_sequence=first, flags=flags)
    copy.messages("last", subject="other")
    copy.flush()
    return copy


@pytest.mark.parametrize(
    "section, flags",
    [(b"", 0), (encode_labels(LABELS)[:-1] + b"?", FLAG_LABELLED), (encode_labels(LABELS[:2]), FLAG_LABELLED)],
    ids=["none", "damaged by the client", "for fewer messages"],
)
def test_frame_without_valid_labels_has_none(section, flags):
    copy = a_log(section, flags)
    assert [list(labels) for labels in copy.log.stored.read_labels(copy.log.frames("s", 0, 9))] == [[], []]


def test_flipped_bits_of_labels_are_detected():
    for at in range(1, 8 * len(encode_labels(LABELS)) + 1):
        copy = a_log(encode_labels(LABELS))
        refs = copy.log.frames("s", 0, 9)
        copy.disk.flip(f"log/{0:020d}.log", 8 * (refs[1].offset + refs[1].length) - at)
        with pytest.raises(CorruptFrame) as problem:
            copy.log.stored.read_labels(refs)
        assert problem.value.offset == refs[1].offset


def test_only_labels_are_read():
    copy = Copy.begun(segment_bytes=700, tail_bytes=0)
    for first in range(0, 30, 3):
        body = join_batch([message("s", f"m{first + at}", size=100) for at in range(3)])
        section = encode_labels(LABELS) if first % 2 else b""
        flags = FLAG_LABELLED if section else 0
        copy.append(FrameKind.MESSAGES, "s", body + section, count=3, first_sequence=first, flags=flags)
    copy.messages("a", size=20_000)
    copy.flush()
    refs, sizes = copy.log.frames("s", 0, 99), copy.read_sizes()
    found = [list(labels) for labels in copy.log.stored.read_labels(refs)]
    assert len(copy.log.bases) > 5 and found == [LABELS if at % 2 else [] for at in range(10)] + [[]]
    sizes.clear()
    copy.log.stored.read_labels(refs[-1:])
    assert sum(sizes) < 5000
