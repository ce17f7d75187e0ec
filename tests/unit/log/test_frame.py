"""Core. Frames at their borders: cut, shortest, longest, and at unaligned offsets."""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

import pytest

from qmq.errors import CorruptFrame
from qmq.log.frame import (
    FLAG_LABELLED,
    FLAG_ORDERED,
    HEADER_BYTES,
    FrameKind,
    check_body,
    decode_frames,
    decode_header,
    encode_header,
    encode_json_body,
    find_frame,
    intact_bytes,
    label_flags,
)
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.types import Epoch
from tests.property.test_frame import BASE, FRAMES, SEGMENT, STARTS, frame_of

KEYED = 1 << 32
"""The smallest label of a message with an order key."""


def test_partial_body_with_matching_crc_is_refused():
    """All data that ends with its own CRC-32 has the same CRC-32."""
    part = b"messages" + crc32(b"messages").to_bytes(4, "little")
    body = part + crc32(part).to_bytes(4, "little")
    assert crc32(part) == crc32(body)
    raw, frame = frame_of("s", body, offset=BASE, previous_chain=0)
    with pytest.raises(CorruptFrame, match="end within the body"):
        check_body(frame, part)
    assert intact_bytes(memoryview(raw)[:-4], BASE) == 0


def test_frames_at_other_offsets_are_not_intact():
    assert intact_bytes(memoryview(SEGMENT), BASE + 8) == 0
    assert intact_bytes(memoryview(SEGMENT[: STARTS[1]] + SEGMENT[STARTS[2] :]), BASE) == STARTS[1]


def test_shortest_frame_is_a_header():
    raw, frame = frame_of("", b"", offset=BASE, previous_chain=0, kind=FrameKind.EPOCH, count=0)
    assert len(raw) == HEADER_BYTES and decode_header(raw, 0, BASE, 0) == frame
    assert intact_bytes(memoryview(raw), BASE) == HEADER_BYTES and find_frame(raw, BASE) == 0


def test_longest_frame_is_decoded():
    fields = {"kind": FrameKind.MESSAGES, "flags": 0, "subject": "", "field": b"", "count": 1, "body_crc": 0}
    numbers = {"epoch": Epoch(1, 1), "high_watermark": 0, "timestamp_ms": 0, "first_sequence": 0}
    head, frame = encode_header(
        **fields, **numbers, body_bytes=FRAME_BYTES_MAX, offset=0, producer=0, batch=0, previous_chain=0
    )
    assert decode_header(head, 0, 0, 0) == frame


@pytest.mark.parametrize(
    ("data", "offset", "begin", "found"),
    [
        pytest.param(SEGMENT, BASE, 0, 0, id="the first byte"),
        pytest.param(SEGMENT, BASE, 1, STARTS[1], id="the next frame"),
        pytest.param(SEGMENT, BASE, STARTS[1], STARTS[1], id="at the begin of the search"),
        pytest.param(bytes(3) + SEGMENT, BASE - 3, 0, 3, id="in bytes at an unaligned offset"),
        pytest.param(b"QMF1" + SEGMENT, BASE - 4, 0, 4, id="behind an unaligned magic number"),
        pytest.param(b"QMF1QMF1" + SEGMENT, BASE - 8, 0, 8, id="behind an aligned magic number"),
        pytest.param(
            frame_of("s", b"", offset=BASE + 4, previous_chain=0)[0], BASE + 4, 0, None, id="at an unaligned offset"
        ),
        pytest.param(SEGMENT[: STARTS[1]], BASE + 8, 0, None, id="of another offset"),
    ],
)
def test_find_frame_searches_aligned_offsets(data, offset, begin, found):
    assert find_frame(data, offset, begin) == found


@pytest.mark.parametrize(
    ("labels", "is_ordered"), [([0], 0), ([KEYED - 1], 0), ([KEYED], 1), ([0, KEYED], 1), ([KEYED, 0], 1)]
)
def test_batch_with_an_order_key_is_ordered(labels, is_ordered):
    assert label_flags(labels) == FLAG_LABELLED + is_ordered * FLAG_ORDERED


def test_json_body_sorts_its_fields():
    assert encode_json_body(b=1, a=2) == b'{"a": 2, "b": 1}'
    assert encode_json_body(c=10, a=2) == b'{"a": 2, "c": 10}       '


def test_cut_log_decodes_to_its_last_whole_frame():
    for number, (begin, end) in enumerate(pairwise(STARTS[:4])):
        for cut in range(begin + 1, end):
            within = "a header" if cut < begin + FRAMES[number].body_at else "the body"
            with pytest.raises(CorruptFrame, match=f"end within {within}") as torn:
                list(decode_frames(SEGMENT[:cut], BASE, 0))
            assert torn.value.offset == BASE + begin
            assert intact_bytes(memoryview(SEGMENT)[:cut], BASE) == begin
