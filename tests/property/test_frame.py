"""Shell. Every cut and flipped bit of a log is detected, and torn tails differ from damage."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.codec import encode_message, join_batch
from qmq.errors import CorruptFrame
from qmq.log.frame import (
    HEADER_BYTES,
    FrameKind,
    decode_frames,
    decode_header,
    encode_header,
    find_frame,
    intact_bytes,
    subject_field,
)
from qmq.message import Message
from qmq.types import Epoch
from tests.support.effort import every

BASE = 1 << 30
SEGMENT_BYTES = 16 * 1024
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def frame_of(subject, body, *, offset, previous_chain, kind=FrameKind.MESSAGES, count=1, **fields):
    """Pack a whole frame; omitted fields have plain values."""
    plain = {"flags": 0, "epoch": Epoch(1, 1), "high_watermark": BASE, "timestamp_ms": 1_700_000_000_000}
    plain |= {"first_sequence": 0, "producer": 7, "batch": 1}
    head, frame = encode_header(
        kind=kind,
        subject=subject,
        field=subject_field(subject),
        count=count,
        body_bytes=len(body),
        body_crc=crc32(body),
        offset=offset,
        previous_chain=previous_chain,
        **(plain | fields),
    )
    return head + body, frame


def build_segment(size):
    """Return the bytes of a log that begins at BASE, about `size` bytes, and its frames."""
    rng, data, frames, chain = Random(1), bytearray(), [], 0
    while True:
        count = rng.randrange(1, 4)
        messages = [
            encode_message(Message("flight.departed", {"n": rng.randbytes(30).hex()}, id=f"{len(frames)}-{n}"), 0)
            for n in range(count)
        ]
        subject = rng.choice(["flight.departed", "订单", "a"])
        raw, frame = frame_of(subject, join_batch(messages), offset=BASE + len(data), previous_chain=chain, count=count)
        if len(data) + len(raw) > size:
            return bytes(data), frames
        data += raw
        frames.append(frame)
        chain = frame.chain


SEGMENT, FRAMES = build_segment(SEGMENT_BYTES)
STARTS = [frame.offset - BASE for frame in FRAMES] + [len(SEGMENT)]
CHAINS = [0] + [frame.chain for frame in FRAMES]


def test_segment_decodes_to_its_frames():
    assert SEGMENT_BYTES - 500 < len(SEGMENT) <= SEGMENT_BYTES
    assert [frame for frame, _ in decode_frames(SEGMENT, BASE, 0)] == FRAMES


@given(st.integers(0, len(SEGMENT)))
def test_intact_bytes_end_at_the_last_whole_frame(size):
    assert intact_bytes(memoryview(SEGMENT)[:size], BASE) == max(start for start in STARTS if start <= size)


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bits_of_a_segment_are_detected(bit):
    segment = bytearray(SEGMENT)
    for number, (begin, end) in enumerate(pairwise(STARTS)):
        is_last = number == len(FRAMES) - 1
        for position in range(begin, end, every(3)):
            segment[position] ^= 1 << bit
            with_flip = bytes(segment[begin:end])
            segment[position] ^= 1 << bit
            with pytest.raises(CorruptFrame) as damage:
                list(decode_frames(with_flip, BASE + begin, CHAINS[number]))
            assert damage.value.offset == BASE + begin
            behind = with_flip + (b"" if is_last else SEGMENT[end : end + 300])
            assert intact_bytes(memoryview(behind), BASE + begin) == 0
            assert find_frame(behind, BASE + begin, 1) == (None if is_last else end - begin)


def test_cuts_of_a_segment_are_torn_tails():
    for number, (begin, end) in enumerate(pairwise(STARTS)):
        assert list(decode_frames(SEGMENT[begin:begin], BASE + begin, CHAINS[number])) == []
        for cut in range(begin + 1, end, every(3)):
            with pytest.raises(CorruptFrame) as torn:
                list(decode_frames(SEGMENT[begin:cut], BASE + begin, CHAINS[number]))
            assert torn.value.offset == BASE + begin
            assert intact_bytes(memoryview(SEGMENT)[begin:cut], BASE + begin) == 0
            assert find_frame(SEGMENT[begin:cut], BASE + begin, 1) is None


@given(st.integers(0, len(FRAMES) - 2), st.integers(1, 8))
def test_missing_frame_is_detected(number, missing):
    """Also if the following frames move into the gap: a frame carries its offset and chain."""
    end = min(number + missing, len(FRAMES) - 1)
    data = SEGMENT[: STARTS[number]] + SEGMENT[STARTS[end] :]
    with pytest.raises(CorruptFrame, match="belongs to offset"):
        list(decode_frames(data, BASE, 0))
    with pytest.raises(CorruptFrame, match="wrong chain"):
        list(decode_frames(SEGMENT[STARTS[end] :], BASE + STARTS[end], CHAINS[number]))


@given(
    subject=st.text(max_size=100).filter(lambda text: len(text.encode()) < 65_536),
    words=st.integers(0, 40),
    kind=st.sampled_from(FrameKind),
    flags=st.integers(0, 255),
    count=U32,
    epoch=st.builds(Epoch, U32, U32),
    offset=U64,
    high_watermark=U64,
    timestamp_ms=st.integers(-(2**63), 2**63 - 1),
    first_sequence=U64,
    producer=U64,
    batch=U64,
    previous_chain=U64,
    fill=st.binary(min_size=8, max_size=8),
)
def test_frame_survives_encoding(subject, words, fill, **fields):
    body = fill * words
    raw, frame = frame_of(subject, body, **fields)
    assert list(decode_frames(raw, fields["offset"], fields["previous_chain"])) == [(frame, body)]
    assert frame.subject == subject and frame.end - frame.offset == len(raw)
    assert {name: getattr(frame, name) for name in fields if name != "previous_chain"} == {
        name: value for name, value in fields.items() if name != "previous_chain"
    }


@given(st.binary(max_size=400), st.sampled_from([0, 8, BASE]))
def test_garbage_is_no_frame(data, offset):
    for garbage in (data, b"QMF1" + data, SEGMENT[:84] + data):
        with pytest.raises(CorruptFrame):
            decode_header(garbage, 0, offset + 8, None)
        assert intact_bytes(memoryview(garbage), offset + 8) == 0
    assert find_frame(b"QMF1" + data, offset) is None


@given(st.integers(0, 20))
def test_frame_quoted_in_a_message_is_skipped(position):
    """A message may contain the bytes of a log at an aligned offset."""
    quoted = SEGMENT[: STARTS[3]]
    raw, _ = frame_of("s", bytes(8 * position) + quoted, offset=BASE + STARTS[3], previous_chain=CHAINS[3])
    damaged = bytearray(raw)
    damaged[0] ^= 1
    assert find_frame(damaged, BASE + STARTS[3]) is None


@given(st.integers(0, 64), st.integers(0, len(FRAMES) - 1))
def test_first_frame_behind_garbage_is_found(zeros, number):
    gap = 8 * zeros
    data = bytes(gap) + SEGMENT[STARTS[number] :]
    assert find_frame(data, BASE + STARTS[number] - gap) == gap


def test_equal_chains_need_equal_bytes():
    """After one different message, all later chains differ."""
    bodies = [join_batch([encode_message(Message("s", {"n": n}, id=str(n)), 0)]) for n in (1, 2)]
    chains = []
    for body in bodies:
        raw, first = frame_of("s", body, offset=0, previous_chain=0)
        later = accumulate(
            range(3),
            lambda frame, _: frame_of("s", bodies[0], offset=frame.end, previous_chain=frame.chain)[1],
            initial=first,
        )
        chains.append([frame.chain for frame in later])
    assert all(ours != theirs for ours, theirs in zip(*chains, strict=True))
    assert HEADER_BYTES == 88
