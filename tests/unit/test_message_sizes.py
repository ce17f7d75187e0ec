"""Core. Each limit of a message: the largest one fits everything that carries it, one byte more is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qmq import message_sizes as sizes
from qmq.broker.settings import BrokerSettings
from qmq.client.backlog import Limits
from qmq.client.delay import delay_of
from qmq.codec import encode_labels, encode_message, join_batch, pack_body, with_subject
from qmq.dead_letters import with_fate
from qmq.errors import CorruptFrame, InvalidMessage, InvalidName, InvalidRequest, MessageTooLarge
from qmq.log.frame import HEADER_BYTES, FrameKind, decode_header, encode_header, subject_field
from qmq.message import Message
from qmq.message_sizes import MIB
from qmq.remoting.commands import offset_header, produce_header
from qmq.remoting.packet import PACKET_HEADER_BYTES, PacketReader, PacketTooLarge, packet_header
from qmq.replication.agreement import Hello
from qmq.settings import InvalidSettings, load
from qmq.subjects import check_subject, retry_subject
from qmq.types import Epoch
from tests.unit.broker.world import Client, Group

LONGEST = retry_subject("s" * 100, "g" * 100)
DATA = encode_message(Message("s", {"n": "1"}, body=b"", tags={"t"}, order_key="k", id="i" * 100), 0)


def around_a_request() -> int:
    """Return the bytes of a request around its message."""
    batch = join_batch([DATA]) + encode_labels([7 << 32])
    return PACKET_HEADER_BYTES + len(produce_header(1, 1, 1, 0, LONGEST)) + len(batch) + 7 - len(DATA)


def test_request_of_the_largest_message_fits():
    assert around_a_request() <= sizes.REQUEST_OVERHEAD_BYTES
    assert sizes.MESSAGE_BYTES_MAX + sizes.REQUEST_OVERHEAD_BYTES <= sizes.REQUEST_BYTES_MAX <= sizes.FRAME_BYTES_MAX


@pytest.mark.parametrize("message_bytes_max", [4 * MIB, 33 * MIB, sizes.MESSAGE_BYTES_MAX])
def test_producer_sends_the_largest_message(message_bytes_max):
    least = max(message_bytes_max + sizes.REQUEST_OVERHEAD_BYTES, 16 * MIB)
    settings = {"packet_bytes_max": least, "window_bytes": least, "message_bytes_max": message_bytes_max}
    assert not sizes.room_complaints(**settings)
    batch_bytes = message_bytes_max + len(join_batch([DATA])) + 7 + len(encode_labels([1])) - len(DATA)
    assert batch_bytes <= Limits(least, least).batch_bytes_max


def test_dead_letter_of_the_largest_message_fits():
    longest = with_fate(DATA, 10**9, "ü" * 16_383, 1 << 63, ("s" * 100, "g" * 100))
    added = len(join_batch([longest])) + len(encode_labels([1])) - len(DATA)
    assert sizes.REQUEST_BYTES_MAX + added <= sizes.FRAME_BYTES_MAX
    assert len(with_subject(DATA, LONGEST)) - len(DATA) < sizes.REQUEST_OVERHEAD_BYTES


def test_packet_between_copies_holds_the_largest_frame():
    around = PACKET_HEADER_BYTES + len(offset_header(0)) + HEADER_BYTES + len(subject_field(LONGEST))
    assert sizes.FRAME_BYTES_MAX + around <= sizes.SYNC_PACKET_BYTES_MAX
    assert sizes.OLDER_FRAME_BYTES_MAX + around <= 64 * MIB


def test_older_slave_reads_a_recurring_schedule():
    assert 2 * sizes.RECURRING_BYTES_MAX < sizes.OLDER_FRAME_BYTES_MAX


def test_limits_have_one_place():
    """A constant of 64 MiB or so elsewhere would not grow with the others."""
    root, found = Path(__file__).parents[2], []
    for folder in ("qmq", "broker", "delayserver", "audit", "tools", "watchdog"):
        for path in (root / folder).rglob("*.py"):
            constants = re.findall(r"^\w*(?:FRAME|PACKET|MESSAGE)_BYTES_MAX = .*", path.read_text(), re.MULTILINE)
            found += [(path.name, constant) for constant in constants]
    assert {name for name, _ in found} == {"acceptor.py", "message_sizes.py"}, found  # acceptor.py: before the login


def frame_of(body_bytes: int) -> bytes:
    header, _ = encode_header(
        kind=FrameKind.MESSAGES,
        flags=0,
        subject="s",
        field=subject_field("s"),
        count=1,
        body_bytes=body_bytes,
        body_crc=0,
        epoch=Epoch(1, 1),
        offset=0,
        high_watermark=0,
        timestamp_ms=0,
        first_sequence=0,
        producer=0,
        batch=0,
        previous_chain=0,
    )
    return header


def receive_packet(size: int) -> None:
    reader = PacketReader(100_000)
    header = packet_header(201, 1, 0, 201, size - 20)
    reader.buffer()[: len(header)] = header
    reader.received(len(header))


def store(size: int) -> None:
    """Store a message of `size` bytes at a broker with the limit 1,024; its refusal is raised."""
    group = Group.made(message_bytes_max=1_024).start()
    client, end = Client(group.a), group.a.log.end
    data = encode_message(Message("s", {}, body=b"", id="i"), 0)
    stored = client.produce_raw([data + bytes(size - len(data))])
    group.settle()
    if refused := client.receipt(stored).refused:
        assert group.a.log.end == end
        raise InvalidMessage(refused[0][1])


def exceed(size: int) -> None:
    if size > (limits := Limits(10_256, 20_000)).batch_bytes_max:
        raise limits.exceeded(size, "g1")


def read_settings(**given: int) -> None:
    environ = {"QMQ_HOSTNAME": "h", "QMQ_DATA": "/d", "QMQ_TOKEN": "t" * 20}
    environ |= {f"QMQ_{name.upper()}": str(value) for name, value in given.items()}
    load(BrokerSettings, prefix="QMQ", path=None, environ=environ)


def large(name: str) -> Callable[[int], None]:
    """Return a function that reads settings for the largest message, `name` of a given size."""
    all_of_it = {"message_bytes_max": 40 * MIB, "packet_bytes_max": 60 * MIB, "window_bytes": 60 * MIB}
    return lambda size: read_settings(**all_of_it | {name: size})


def send(**content: Any) -> bytes:
    return encode_message(Message(**{"subject": "s", "id": "i"} | content), 0)


class Limit(NamedTuple):
    """`use(size)` works up to `most`; one more raises `error` with `names` in its text."""

    use: Callable[[int], object]
    most: int
    error: type[Exception]
    names: str


LIMITS = {
    "body": Limit(lambda n: pack_body(bytes(n), None), 64 * MIB, MessageTooLarge, "67108865 bytes is more than 6"),
    "id": Limit(lambda n: send(id="i" * n), 100, InvalidMessage, "not 1 to 100"),
    "tags": Limit(lambda n: send(tags={f"t{at}" for at in range(n)}), 10, InvalidMessage, "more than 10"),
    "tag": Limit(lambda n: send(tags={"t" * n}), 32_767, InvalidMessage, "a tag has 32768 bytes, more than 32767"),
    "name": Limit(lambda n: send(properties={"n" * n: "v"}), 32_767, InvalidMessage, "name has 32768 bytes"),
    "value": Limit(lambda n: send(properties={"n": "v" * n}), 32_767, InvalidMessage, "property 'n' has 32768 bytes"),
    "order key": Limit(lambda n: send(order_key="k" * n), 32_767, InvalidMessage, "the order key has 32768 bytes"),
    "content type": Limit(lambda n: send(body=b"", content_type="t" * n), 32_767, InvalidMessage, "type has 32768"),
    "subject": Limit(lambda n: check_subject("s" * n), 100, InvalidName, "longer than 100 bytes"),
    "cancel key": Limit(lambda n: delay_of(1, None, "k" * n, now_ms=0), 100, InvalidRequest, "of 1 to 100 bytes"),
    "message": Limit(store, 1_024, InvalidMessage, r"1025 bytes are more than 1024 \(message_bytes_max\)"),
    "request": Limit(exceed, 10_000, MessageTooLarge, "limit of g1, 10000: .* packet_bytes_max and window_bytes"),
    "packet": Limit(receive_packet, 100_000, PacketTooLarge, "limit of 100000; .* packet_bytes_max"),
    "frame": Limit(lambda n: decode_header(frame_of(8 * n), 0, 0, None), 9 * MIB, CorruptFrame, "end within a header"),
    "message_bytes_max": Limit(large("message_bytes_max"), 60 * MIB - 1024, InvalidSettings, "set packet_bytes_max ="),
    "packet_bytes_max": Limit(large("packet_bytes_max"), 66 * MIB, InvalidSettings, "packet_bytes_max: .* more than"),
}
"""By the part of a message, or the setting."""


@pytest.mark.parametrize("name", LIMITS)
def test_one_byte_more_is_refused_by_name(name):
    use, most, error, names = LIMITS[name]
    use(most)
    with pytest.raises(error, match=names):
        use(most + 1)


def test_default_message_limits_stay():
    """Raising them is an operator's choice, after all processes can read such messages."""
    defaults = {field.name: field.default for field in dataclasses.fields(BrokerSettings)}
    assert (defaults["message_bytes_max"], defaults["packet_bytes_max"]) == (4 * MIB, 16 * MIB)


def test_smaller_requests_than_messages_are_kept():
    """Earlier settings still start: a message above the request limit is refused by its producer."""
    read_settings(message_bytes_max=32 * MIB, packet_bytes_max=MIB, window_bytes=MIB)


def test_hello_states_the_longest_frame():
    group = Group.made().start()
    assert group.a.master.slaves.all[0].frame_bytes_max == sizes.FRAME_BYTES_MAX
    stated = json.loads(Hello("g1", "b", Epoch(1, 1), [], 0, 0, 0, frame_bytes_max=5).encode())
    assert Hello.decode(json.dumps(stated).encode()).frame_bytes_max == 5
    del stated["frame_bytes_max"]
    assert Hello.decode(json.dumps(stated).encode()).frame_bytes_max == sizes.OLDER_FRAME_BYTES_MAX


def test_slave_limits_the_frames_of_its_master():
    """A slave of an earlier version would take a longer frame for damage."""
    group = Group.made().start()
    client, end = Client(group.a), group.a.log.end
    (watch,) = group.a.master.slaves.all
    watch.frame_bytes_max = 200
    group.a.master.slaves.changed()
    refused = client.produce("m", size=300)
    assert client.code(refused).name == "MESSAGE_TOO_LARGE" and group.a.log.end == end
    assert "more than 200, which a slave of g1 reads: upgrade it" in client.text(refused)
    stored = client.produce("m", size=80)
    group.settle()
    assert client.receipt(stored).stored == 1
