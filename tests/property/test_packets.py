"""Shell. Packets survive any split of the stream; garbage raises a typed error."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidRequest
from qmq.remoting import commands
from qmq.remoting.packet import PACKET_HEADER_BYTES, PacketReader, packet_header, read_packet
from qmq.types import Epoch

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
i16 = st.integers(-(2**15), 2**15 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
names = st.text(max_size=30)


class SmallReader(PacketReader):
    """Reader with a small staging area, so that packets of some hundred bytes take the path of large ones."""

    FIRST_BYTES, STAGING_BYTES = PACKET_HEADER_BYTES, 512


def feed(reader, data, sizes):
    """Pass `data` to the reader in pieces of at most `sizes`, repeated; return all packets."""
    packets, at, turn = [], 0, 0
    while at < len(data):
        buffer = reader.buffer()
        assert len(buffer) > 0, "the transport would spin"
        count = min(len(buffer), sizes[turn % len(sizes)], len(data) - at)
        buffer[:count] = data[at : at + count]
        packets += reader.received(count)
        at, turn = at + count, turn + 1
    return packets


requests = st.lists(st.tuples(i16, i32, i32, i16, st.binary(max_size=600)), max_size=12)
splits = st.lists(st.integers(1, 700), min_size=1, max_size=8)


@given(requests, splits, st.sampled_from([PacketReader, SmallReader]))
def test_packets_survive_any_split(requests, sizes, kind):
    stream = b"".join(packet_header(*fields, len(body)) + body for *fields, body in requests)
    packets = feed(kind(10_000), stream, sizes)
    assert [(*packet[:4], bytes(packet.body)) for packet in packets] == requests


@given(requests, splits, st.binary(min_size=PACKET_HEADER_BYTES, max_size=2000))
def test_garbage_stream_raises_a_typed_error(requests, sizes, garbage):
    stream = b"".join(packet_header(*fields, len(body)) + body for *fields, body in requests)
    with pytest.raises(InvalidRequest):
        feed(SmallReader(10_000), stream + garbage, sizes)


@given(splits, st.integers(0, 8 * PACKET_HEADER_BYTES - 1))
def test_flipped_header_bit_changes_or_ends_the_stream(sizes, bit):
    """The header has no checksum; the CRCs of batches and frames protect the contents."""
    stream = bytearray(packet_header(201, 1, 0, 201, 40) + bytes(40))
    stream[bit // 8] ^= 1 << bit % 8
    try:
        packets = feed(SmallReader(10_000), bytes(stream), sizes)
    except InvalidRequest:
        return
    assert len(packets) <= 1


def test_oversized_packet_is_refused_by_its_header():
    reader = PacketReader(1000)
    with pytest.raises(InvalidRequest, match="over the limit of 1000"):
        feed(reader, packet_header(201, 1, 0, 201, 981), [PACKET_HEADER_BYTES])
    [largest] = feed(PacketReader(1000), packet_header(1, 7, 0, 1, 980) + bytes(980), [99])
    assert largest.opaque == 7


def test_receive_buffer_grows_with_traffic():
    """A thousand idle connections used to take 256 MB."""
    reader, small = PacketReader(10_000), packet_header(201, 1, 0, 201, 40) + bytes(40)
    assert len(feed(reader, 100 * small, [len(small)])) == 100 and len(reader.buffer()) == PacketReader.FIRST_BYTES
    assert len(feed(reader, 10_000 * small, [1 << 20])) == 10_000
    assert PacketReader.STAGING_BYTES - len(small) < len(reader.buffer()) <= PacketReader.STAGING_BYTES


def test_returned_packet_does_not_change():
    body = bytes(range(256)) * 4096
    stream = b"".join(packet_header(201, n, 0, 201, len(body)) + body for n in range(3))
    packets = feed(PacketReader(1 << 21), stream, [65_536])
    assert [bytes(packet.body) for packet in packets] == [body] * 3
    assert [packet.opaque for packet in packets] == [0, 1, 2]


@given(U64, U64, U32, names, st.integers(0, 7), st.binary(max_size=100))
def test_produce_survives_encoding_and_detects_damage(producer, batch, count, subject, flags, data):
    header = commands.produce_header(producer, batch, count, crc32(data), subject, flags)
    read = commands.decode_produce(memoryview(header + data))
    assert read == (producer, batch, count, crc32(data), subject, flags, data)
    for position in range(len(header), len(header) + len(data)):
        damaged = bytearray(header + data)
        damaged[position] ^= 1
        with pytest.raises(InvalidRequest, match="CRC"):
            commands.decode_produce(memoryview(damaged))


refusals = st.lists(st.tuples(U32, st.text(max_size=50)), max_size=5)


@given(st.builds(commands.Produced, U64, U32, st.integers(0, 2), refusals, U32))
def test_produced_survives_encoding(produced):
    assert commands.decode_produced(memoryview(commands.encode_produced(produced))) == produced


piece = st.tuples(U64, U64, U32, st.integers(0, 1), st.integers(0, commands.TIMES_MAX), st.binary(max_size=80))


@given(st.lists(piece, max_size=5))
def test_pulled_survives_encoding_and_detects_damage(rows):
    data = b"".join(
        commands.piece_header(pull, sequence, count, len(body), crc32(body), flags, times) + body
        for pull, sequence, count, flags, times, body in rows
    )
    assert list(commands.decode_pulled(memoryview(data))) == rows
    for cut in range(1, commands.PIECE_BYTES):
        with pytest.raises(InvalidRequest):
            list(commands.decode_pulled(memoryview(data + bytes(cut))))


@given(st.builds(commands.Pull, U32, U32, U32, U32))
def test_pull_survives_encoding(pull):
    assert commands.decode_pull(memoryview(commands.encode_pull(pull))) == pull


ascending = st.lists(U64, min_size=2, max_size=12).map(sorted).map(lambda ends: list(zip(ends[::2], ends[1::2])))


@given(st.builds(commands.Ack, U32, ascending), U64)
def test_ack_survives_encoding(ack, end):
    assert commands.decode_ack(memoryview(commands.encode_ack(ack))) == ack
    assert commands.decode_acked(memoryview(commands.encode_acked(end))) == end


@given(ascending, st.data(), U32, st.text(max_size=30))
def test_nack_survives_encoding(ranges, data, subscription, reason):
    delays, verdicts = st.integers(0, commands.DELAY_MS_MAX), st.sampled_from(commands.Verdict)
    entries = [commands.NackEntry(*range_, data.draw(delays), data.draw(verdicts)) for range_ in ranges]
    nack = commands.Nack(subscription, entries, reason)
    assert commands.decode_nack(memoryview(commands.encode_nack(nack))) == nack


def test_overlapping_ranges_are_refused():
    with pytest.raises(InvalidRequest, match="overlap"):
        commands.decode_ack(memoryview(commands.encode_ack(commands.Ack(1, [(0, 5), (4, 6)]))))
    entries = [commands.NackEntry(3, 4, 0, 0), commands.NackEntry(0, 1, 0, 0)]
    with pytest.raises(InvalidRequest, match="ascend"):
        commands.decode_nack(memoryview(commands.encode_nack(commands.Nack(1, entries, ""))))


@pytest.mark.parametrize(
    "entry",
    [commands.NackEntry(0, 1, commands.DELAY_MS_MAX + 1, 0), commands.NackEntry(0, 1, 0, max(commands.Verdict) + 1)],
)
def test_unknown_delay_or_verdict_is_refused(entry):
    with pytest.raises(InvalidRequest):
        commands.decode_nack(memoryview(commands.encode_nack(commands.Nack(1, [entry], ""))))


words = st.text(min_size=1, max_size=30)
states = st.lists(st.sampled_from(commands.DelayState), max_size=5)


@given(st.builds(commands.Cancel, names, st.lists(words, min_size=1), st.lists(words), U64), states, states)
def test_cancel_and_answer_survive_encoding(cancel, ids, keys):
    assert commands.decode_cancel(memoryview(commands.encode_cancel(cancel))) == cancel
    cancelled = commands.Cancelled(ids, keys)
    assert commands.decode_cancelled(memoryview(commands.encode_cancelled(cancelled))) == cancelled


@given(names, words, st.booleans(), U64, st.sampled_from(commands.DelayState))
def test_reschedule_and_answer_survive_encoding(subject, word, is_id, due_ms, state):
    reschedule = commands.Reschedule(subject, word if is_id else "", "" if is_id else word, due_ms)
    assert commands.decode_reschedule(memoryview(commands.encode_reschedule(reschedule))) == reschedule
    assert commands.decode_rescheduled(memoryview(commands.encode_rescheduled(state))) is state


@pytest.mark.parametrize(
    "decode, fields",
    [
        pytest.param(commands.decode_cancel, {"subject": "s", "ids": [], "keys": [], "due_ms": 0}, id="no name"),
        pytest.param(commands.decode_cancel, {"subject": "s", "ids": [1], "keys": [], "due_ms": 0}, id="no word"),
        pytest.param(commands.decode_cancel, {"subject": "s", "ids": [""], "keys": [], "due_ms": 0}, id="empty word"),
        pytest.param(commands.decode_cancelled, {"ids": ["gone"], "keys": []}, id="an unknown state"),
        pytest.param(commands.decode_reschedule, {"subject": "s", "id": "i", "key": "k", "due_ms": 0}, id="both"),
        pytest.param(commands.decode_reschedule, {"subject": "s", "id": "", "key": "", "due_ms": 0}, id="neither"),
        pytest.param(commands.decode_rescheduled, {"outcome": "moved"}, id="an unknown outcome"),
    ],
)
def test_malformed_recall_is_refused(decode, fields):
    with pytest.raises(InvalidRequest):
        decode(commands.encode_json(**fields))


@given(st.builds(commands.Confirmation, st.builds(Epoch, U32, U32), U64, U64))
def test_confirmation_survives_encoding(confirmation):
    assert commands.decode_confirmation(memoryview(commands.encode_confirmation(confirmation))) == confirmation


@given(U64, st.binary(max_size=40))
def test_bytes_with_offset_survive_encoding(offset, data):
    assert commands.split_offset(memoryview(commands.offset_header(offset) + data)) == (offset, data)


@pytest.mark.parametrize("field", ["", "x", 0, None, True, 1.5, [], {}], ids=repr)
def test_field_of_another_type_is_refused(field):
    body = commands.encode_json(field=field)
    for kind in {str, int, list, dict} - {type(field)}:
        with pytest.raises(InvalidRequest, match="'field'"):
            commands.decode_json(body, field=kind)


DECODERS = [
    lambda body: commands.decode_json(body, token=str),
    commands.decode_produce,
    commands.decode_nack,
    commands.decode_cancel,
    commands.decode_cancelled,
    commands.decode_reschedule,
    commands.decode_rescheduled,
    commands.decode_produced,
    commands.decode_pull,
    lambda body: list(commands.decode_pulled(body)),
    commands.decode_ack,
    commands.decode_acked,
    commands.split_offset,
    commands.decode_confirmation,
]


@given(st.binary(max_size=120))
def test_garbage_body_raises_a_typed_error(data):
    for decode in DECODERS:
        try:
            decode(memoryview(data))
        except InvalidRequest:
            pass


def test_deeply_nested_json_raises_a_typed_error():
    with pytest.raises(InvalidRequest, match="not JSON"):
        commands.decode_json(b"[" * 100_000, token=str)


def test_single_packet_is_decoded():
    packet = read_packet(packet_header(320, 9, 1, 201, 2) + b"no")
    assert packet.is_response and packet.body == b"no"
