"""Core. A broker refuses single messages that break a limit, from any client."""

from __future__ import annotations

import struct

import pytest

from qmq.codec import decode_labels, encode_labels, join_batch, label_of
from qmq.errors import ErrorCode
from qmq.log.fold import BATCHES_PER_PRODUCER
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED
from qmq.server.producing import check_messages
from tests.unit.broker.world import Client, Group, message


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(">H", len(data)) + data


def raw(id: str = "the-id", *, tags: int = 0, properties: bytes = b"", subject: str = "s") -> bytes:
    """Return a message that our encoder would refuse."""
    section = bytes([tags]) + b"".join(string(f"t{number}") for number in range(tags)) if tags else b""
    head = struct.pack(">Bqq", 4 if tags else 0, 1, 1) + string(subject) + string(id) + section
    return head + struct.pack(">i", len(properties)) + properties


BAD = [
    pytest.param(raw("i" * 101), "its id has 101 bytes", id="id of 101 bytes"),
    pytest.param(raw("i" * 300), "its id has 300 bytes", id="id of 300 bytes"),
    pytest.param(raw(""), "its id has 0 bytes", id="no id"),
    pytest.param(raw(tags=11), "message the-id: 11 tags are more than 10", id="eleven tags"),
    pytest.param(
        raw(properties=string("n") + string("x" * 40_000)),
        "message the-id: the value of property 'n' has 40000 bytes",
        id="a property of 40,000 bytes",
    ),
    pytest.param(
        raw(properties=string("x" * 40_000) + string("v")), "message the-id: the name of property 'xxx", id="its name"
    ),
    pytest.param(b"\xff" * 60, "not a message in QMQ's encoding", id="garbage"),
]


@pytest.mark.parametrize("bad, reason", BAD)
def test_invalid_message_is_refused_alone(bad, reason):
    """QMQ stores a property of 40,000 bytes, and every consumer silently drops its message."""
    group = Group.made(message_bytes_max=1 << 20).start()
    client = Client(group.a)
    stored = client.produce_raw([message("s", "m0"), bad, message("s", "m1")], batch=5)
    group.settle()
    again = client.produce_raw([message("s", "m0"), bad, message("s", "m1")], batch=5)
    group.settle()
    receipt = client.receipt(stored)
    assert (receipt.first_sequence, receipt.stored) == (0, 2) and client.receipt(again) == receipt
    [(position, why)] = receipt.refused
    assert position == 1 and reason in why


@pytest.mark.parametrize(
    "good",
    [
        pytest.param(raw("i" * 100), id="longest id"),
        pytest.param(raw(tags=10), id="ten tags"),
        pytest.param(raw(properties=string("n") + string("x" * 32_767)), id="longest value"),
        pytest.param(raw(properties=(string("n") + string("x" * 30_000)) * 5), id="large, of short values"),
        pytest.param(raw(subject="another"), id="of another subject"),
        pytest.param(raw(subject="%RETRY%" + "s" * 100 + "%" + "g" * 100), id="long subject"),
    ],
)
def test_messages_within_the_limits_are_accepted(good):
    assert check_messages(join_batch([message("s", "m"), good]), 2, 1 << 20) == []


def labels_of(group: Group) -> list[list[int]]:
    frames = [entry.frame for entry in group.a.log._tail.values() if entry.frame.count]
    return [
        list(decode_labels(b"".join(map(bytes, group.a.log._tail[frame.offset].parts)), frame.count))
        for frame in frames
        if frame.flags & FLAG_LABELLED
    ]


def test_stored_messages_keep_their_labels():
    group = Group.made(message_bytes_max=1 << 20).start()
    client = Client(group.a)
    labels = [label_of({"a"}, None), label_of({"b"}, "k"), label_of((), "l")]
    stored = client.produce_raw(
        [message("s", "m0"), raw("i" * 101), message("s", "m1")],
        after=encode_labels(labels),
        flags=FLAG_LABELLED | FLAG_ORDERED,
    )
    group.settle()
    assert client.receipt(stored).stored == 2
    assert labels_of(group) == [[labels[0], labels[2]]]


def damaged(section: bytes, at: int) -> bytes:
    return section[:at] + bytes([section[at] ^ 1]) + section[at + 1 :]


SECTION = encode_labels([label_of({"a"}, "k"), 0])


@pytest.mark.parametrize(
    "after, flags",
    [
        pytest.param(SECTION, FLAG_ORDERED, id="ordered without labels"),
        pytest.param(SECTION, 8, id="unknown flag"),
        pytest.param(SECTION, 1 | FLAG_LABELLED, id="a flag reserved for frames"),
        pytest.param(SECTION, 0, id="labels without their flag"),
        pytest.param(b"", FLAG_LABELLED, id="no labels"),
        pytest.param(SECTION[8:], FLAG_LABELLED, id="too few labels"),
        pytest.param(encode_labels([1, 2, 3]), FLAG_LABELLED, id="too many labels"),
        *(
            pytest.param(damaged(SECTION, at), FLAG_LABELLED | FLAG_ORDERED, id=f"damaged at {at}")
            for at in (0, 17, 23)
        ),
    ],
)
def test_wrong_labels_are_refused(after, flags):
    group = Group.made().start()
    client = Client(group.a)
    end = group.a.log.end
    refused = client.produce_raw([message("s", "m0"), message("s", "m1")], after=after, flags=flags)
    assert client.code(refused) == ErrorCode.INVALID_REQUEST
    assert group.a.log.end == end


def test_long_derived_subject_is_accepted():
    """Retry and dead-letter subjects are exempt from the length limit of subjects."""
    group = Group.made().start()
    client = Client(group.a)
    stored = client.produce("m", subject=f"%RETRY%{'s' * 100}%{'g' * 100}")
    group.settle()
    assert client.receipt(stored).stored == 1
    assert client.code(client.produce("m", subject=f"%RETRY%{'s' * 101}%g")) == ErrorCode.INVALID_NAME


def test_repeats_within_64_batches_are_stored_once():
    """P2: repeats of the last 64 batches of a producer are recognised; the 65th is unknown and not stored again."""
    group = Group.made().start()
    client = Client(group.a)
    for batch in range(1, BATCHES_PER_PRODUCER + 2):
        client.produce(f"m{batch}", batch=batch)
    group.settle()
    end = group.a.log.end
    newest, oldest = client.produce("m65", batch=65), client.produce("m2", batch=2)
    forgotten = client.produce("m1", batch=1)
    group.settle()
    assert (client.receipt(newest).first_sequence, client.receipt(oldest).first_sequence) == (64, 1)
    assert client.code(forgotten) == ErrorCode.OUTCOME_UNKNOWN
    assert group.a.log.end == end
