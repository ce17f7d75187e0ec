"""Core. Produce requests: stored, refused, acknowledged."""

from __future__ import annotations

import pytest

from qmq.errors import ErrorCode
from qmq.remoting.commands import Command
from qmq.replication.readonly import Reason
from qmq.types import Role
from tests.unit.broker.world import a_group, message


@pytest.mark.slow
def test_largest_batch_of_refused_messages_is_answered():
    group, client = a_group()
    most, more = client.produce_raw([b""] * 65_535), client.produce_raw([b""] * 65_536)
    receipt = client.receipt(most)
    assert receipt.stored == 0 and len(receipt.refused) == 65_535
    assert client.code(more) == ErrorCode.INVALID_REQUEST
    assert group.a.log.end == group.b.log.end


def test_fsync_covers_all_earlier_arrivals():
    group, client = a_group()
    client.produce("first")
    group.a.host.turn()
    later = [client.produce(f"m{i}") for i in range(50)]
    group.a.host.turn()
    before = group.a.host.performed
    group.settle()
    assert group.a.host.performed == before + 2
    assert [client.receipt(opaque).first_sequence for opaque in later] == list(range(1, 51))


def test_batch_older_than_the_window_is_unknown():
    group, client = a_group()
    for batch in range(100, 170):
        client.produce("m", batch=batch)
    group.settle()
    end = group.a.log.end
    assert client.code(client.produce("m", batch=101)) == ErrorCode.OUTCOME_UNKNOWN
    assert group.a.log.end == end


def test_stored_part_of_a_batch_is_acknowledged_again():
    """An application deletes rows that it sent itself, also those of a watchdog's batch; the rest is sent again."""
    group, client = a_group()
    client.store("m0", "m1", "m2", batch=5)
    receipt = client.store("m0", "m2", batch=5)
    assert (receipt.first_sequence, receipt.stored, receipt.refused) == (0, 2, [])
    again = [message("s", id, 30) for id in ("m2", "new", "m1", "m0")]  # the encoding may be another one
    repeated = client.produce_raw([*again[:2], b"none", *again[2:]], batch=5)
    group.settle()
    receipt = client.receipt(repeated)
    assert receipt.stored == 3 and [position for position, _ in receipt.refused] == [1, 2]
    assert "send it in a new batch" in receipt.refused[0][1]
    assert group.a.log.state.next_sequence["s"] == 3


def test_repeats_without_the_slave_hold_no_memory():
    """A safe batch is acknowledged again; the outcome of an unsafe one is unknown."""
    group, client = a_group()
    safe = client.store("m0", batch=9)
    client.produce("m1", batch=10)
    group.a.host.turn()
    group.cut()
    waiting = group.a.master.gate.waiting
    assert waiting == 1
    for _ in range(20):
        assert client.receipt(client.produce("m0", batch=9)) == safe
        again = group.client("again")
        assert again.code(again.produce("m1", batch=10)) == ErrorCode.OUTCOME_UNKNOWN
        again.lost()
    assert group.a.master.gate.waiting == waiting


def test_produce_before_the_mastership_is_refused():
    """Nothing is stored then. After NOT_SERVED the producer would repeat the batch to this group for hours."""
    group, _ = a_group()
    group.cut()
    group.a.crash()
    client = group.client()
    assert client.code(client.produce("m0")) == ErrorCode.NOT_MASTER
    group.a.assign(Role.MASTER)
    refused = client.produce("m1")
    assert client.code(refused) == ErrorCode.READ_ONLY and "waits for its slave" in client.text(refused)


@pytest.mark.parametrize("how", ["gone", "damaged", "the mastership is over"])
def test_outcome_of_an_unreadable_repeated_batch_is_unknown(how):
    group, client = a_group(tail_bytes=0)
    client.store("m0", "m1", "m2", batch=5)
    if how == "gone":
        while len(group.a.log.bases) < 3:
            client.store("x", size=900)
        group.a.drop_oldest_segment()
    ref = group.a.log.frames("s", 0, 1)[0]
    if how == "damaged":
        group.a.flip(ref.offset + ref.length - 3)
    repeated = client.produce("m0", "m2", batch=5)
    if how == "the mastership is over":
        group.a.node.role.step_down()
    group.settle()
    assert client.code(repeated) == ErrorCode.OUTCOME_UNKNOWN
    assert (group.a.log.damage is not None) == (how == "damaged")


def test_message_that_cannot_be_stored_is_refused_alone():
    """W22: the others are stored, without gaps, and the receipt names it by its position."""
    group, client = a_group()
    good = [message("s", f"m{i}") for i in range(3)]
    stored = client.produce_raw([b"", good[0], b"x" * 5_000, good[1], b"short", good[2]])
    group.settle()
    receipt = client.receipt(stored)
    assert (receipt.first_sequence, receipt.stored) == (0, 3)
    assert [position for position, _ in receipt.refused] == [0, 2, 4] and all(why for _, why in receipt.refused)
    client.join()
    assert client.take() == ["m0", "m1", "m2"]


def test_batch_with_a_wrong_crc_is_refused():
    """W4: the CRC is checked before the batch is stored, so no restart finds it damaged."""
    group, client = a_group()
    end = group.a.log.end
    refused = client.produce_raw([message("s", "m")], crc=12345)
    assert client.code(refused) == ErrorCode.INVALID_REQUEST and "CRC" in client.text(refused)
    assert group.a.log.end == end and not group.a.host.pass_is_due
    assert client.store("next").first_sequence == 0


@pytest.mark.parametrize("body", [b"", b"\xff" * 11, bytes(26), b"\xff" * 64], ids=len)
def test_garbage_is_refused_and_changes_nothing(body):
    group, client = a_group()
    end = group.a.log.end
    for command in (Command.PRODUCE, Command.SUBSCRIBE, Command.PULL, Command.ACK, Command.UNSUBSCRIBE, Command.HELLO):
        assert client.link.answers[client.send(command, body)][0] != 0, command
    assert group.a.log.end == end and group.a.node.writable
    assert client.code(client.send(999, body)) == ErrorCode.UNKNOWN_COMMAND


@pytest.mark.parametrize("subject", ["x" * 300, "a/b", "a\rb", "a\nb", "", " a", "x" * 101, "é" * 51])
def test_illegal_subject_never_reaches_the_log(subject):
    """W7"""
    group, client = a_group()
    end = group.a.log.end
    assert client.code(client.produce("m", subject=subject)) == ErrorCode.INVALID_NAME
    assert client.code(client.subscribe(subject=subject)) == ErrorCode.INVALID_NAME
    assert client.code(client.subscribe(group=subject)) == ErrorCode.INVALID_NAME
    assert client.code(client.subscribe(subject)) == ErrorCode.INVALID_NAME
    assert group.a.log.end == end


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in (Reason.FENCED,)])
def test_readonly_group_refuses_produces_and_serves_pulls(reason):
    """P3"""
    group, client = a_group()
    client.produce("m")
    client.join()
    group.a.master.readonly.change(reason, True)
    refused = client.produce("n")
    assert client.code(refused) == ErrorCode.READ_ONLY and str(reason) in client.text(refused)
    if reason != Reason.DRAINING:
        assert client.take() == ["m"]
    group.a.master.readonly.change(reason, False)
    assert client.store("n").stored == 1


def test_unacknowledged_bytes_of_a_connection_are_bounded():
    group, client = a_group(window_bytes=1 << 20, message_bytes_max=1 << 20)
    produced = [client.produce(f"m{number}", size=30_000) for number in range(60)]
    refused = [opaque for opaque in produced if client.answered(opaque)]
    assert refused == produced[-len(refused) :] and client.code(refused[0]) == ErrorCode.OVERLOADED
    assert group.client("another").store("m") and client.store("after", size=30_000)
