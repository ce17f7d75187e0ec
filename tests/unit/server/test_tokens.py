"""Core. Cached tokens, and the rights of a connection."""

from __future__ import annotations

import struct

import pytest

from qmq.errors import InvalidRequest, MissingRight, Overloaded
from qmq.proto import qmq_pb2 as pb
from qmq.rations import NewSubjects, SentBytes
from qmq.remoting.commands import Command, encode_subscribe, produce_header
from qmq.remoting.packet import Packet
from qmq.rights import Caller, Scope, TokenRole
from qmq.server.access import CONTROL_ROLES, KNOWN_MAX, Limits, TokenCache, check_broker, check_client


def packet(command, body):
    return Packet(command, 1, 0, 0, memoryview(body))


def produce(subject):
    return packet(Command.PRODUCE, produce_header(1, 1, 0, 0, subject) + b"batch")


def subscribe(subject):
    return packet(Command.SUBSCRIBE, encode_subscribe(subject=subject, group="g", consumer="c"))


def limits(*subjects, per_minute=1000, in_all=1_000_000, sent=None):
    return Limits(Caller("shop", TokenRole.CLIENT, Scope(subjects)), NewSubjects(per_minute, in_all), sent)


def test_control_methods_have_roles():
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["Broker"].methods}
    assert methods == set(CONTROL_ROLES) and all(CONTROL_ROLES.values())


def test_changing_methods_need_the_cluster_role():
    for method in ("PrepareSwap", "CancelSwap", "ResetOffset"):
        assert CONTROL_ROLES[method] == {TokenRole.CLUSTER}


def test_scope_limits_producing_and_consuming():
    allowed = limits("produce:order", "consume:paid.*")
    allowed.check(produce("order"), {}, now_ms=0)
    allowed.check(subscribe("paid.card"), {}, now_ms=0)
    with pytest.raises(MissingRight, match="may not produce to 'paid.card'"):
        allowed.check(produce("paid.card"), {}, now_ms=0)
    with pytest.raises(MissingRight, match="may not consume from 'order'"):
        allowed.check(subscribe("order"), {}, now_ms=0)


@pytest.mark.parametrize("group", ["billing", "shipping"])
def test_consumer_token_may_not_write_derived_subjects(group):
    """A message stored by a consume-only token in %RETRY%order%billing reached the handler of billing."""
    allowed = limits("consume:order")
    with pytest.raises(MissingRight, match=f"may not produce to '%RETRY%order%{group}': that needs redrive:order"):
        allowed.check(produce(f"%RETRY%order%{group}"), {}, now_ms=0)
    with pytest.raises(MissingRight, match="brokers alone write dead letters"):
        allowed.check(produce(f"%DEAD_RETRY%order%{group}"), {}, now_ms=0)
    limits("consume:order", "redrive:order").check(produce(f"%RETRY%order%{group}"), {}, now_ms=0)


@pytest.mark.parametrize("command", [Command.CANCEL, Command.RESCHEDULE, Command.RECUR])
def test_changing_delayed_messages_needs_produce_rights(command):
    allowed = limits("produce:order", "consume:paid")
    allowed.check(packet(command, b'{"subject": "order"}'), {}, now_ms=0)
    for subject in ("paid", "%RETRY%paid%billing"):
        with pytest.raises(MissingRight, match=f"may not produce to '{subject}'"):
            allowed.check(packet(command, b'{"subject": "%s"}' % subject.encode()), {}, now_ms=0)


def test_refused_subject_is_refused_again():
    allowed = limits("order")
    for _ in range(3):
        with pytest.raises(MissingRight):
            allowed.check(produce("other"), {}, now_ms=0)
        allowed.check(produce("order"), {}, now_ms=0)


def test_only_new_subjects_are_rationed():
    """Weakness 31: any client could fill the tables."""
    allowed = limits(per_minute=2)
    known = {"old": 5}
    for subject in ("old", "new1", "new2", "new1", "old"):
        allowed.check(produce(subject), known, now_ms=0)
    with pytest.raises(Overloaded, match="too many new subjects"):
        allowed.check(produce("new3"), known, now_ms=0)
    allowed.check(produce("new3"), known, now_ms=30_000)


@pytest.mark.parametrize(
    "wrong",
    [
        packet(Command.PRODUCE, b"short"),
        packet(Command.PRODUCE, struct.pack("<QQIIHH", 1, 1, 0, 0, 2, 0) + b"\xff\xff"),
        packet(Command.SUBSCRIBE, b"{"),
        packet(Command.SUBSCRIBE, b'{"subject": 5}'),
    ],
    ids=["cut", "no text", "no JSON", "no subject"],
)
def test_malformed_request_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        limits().check(wrong, {}, now_ms=0)


@pytest.mark.parametrize("role", TokenRole)
def test_roles_of_each_port(role):
    caller = Caller("x", role, Scope(groups=("g1",)))
    for check, allowed in ((check_client, {"client", "cluster"}), (check_broker, {"broker", "cluster"})):
        if role in allowed:
            check(caller, "g1")
            with pytest.raises(MissingRight, match="broker group 'g2'"):
                check(caller, "g2")
        else:
            with pytest.raises(MissingRight, match="role"):
                check(caller, "g1")


def test_token_cache_drops_refused_tokens_first():
    cache = TokenCache("own")
    cache.accepted("good", Caller("shop", TokenRole.CLIENT), valid_ms=10, expires_in_ms=0, now_ms=0)
    for number in range(KNOWN_MAX + 10):
        cache.refused(f"wrong{number}", "no", now_ms=0)
    assert len(cache._known) <= KNOWN_MAX and cache.fallback("good", now_ms=0) is not None


def test_byte_ration_spans_connections_of_a_token():
    sent, batch = SentBytes(1_000), produce("order")
    first, other = limits("produce:order", sent=sent), limits("produce:order", sent=sent)
    with pytest.raises(MissingRight):
        first.check(packet(Command.PRODUCE, produce_header(1, 1, 0, 0, "paid") + bytes(9_999)), {}, now_ms=0)
    first.check(packet(Command.PRODUCE, bytes(batch.body) + bytes(999)), {}, now_ms=0)
    with pytest.raises(Overloaded) as caught:
        other.check(batch, {}, now_ms=0)
    assert caught.value.limit == "token_bytes_per_s"
    other.check(packet(Command.PULL, b""), {}, now_ms=0)


def test_recurring_schedule_counts_as_produced_bytes():
    """Each replacement of a schedule is written to both logs with its message."""
    allowed = limits("produce:order", sent=SentBytes(1_000))
    put = packet(Command.RECUR, b'{"subject": "order", "message": "' + b"x" * 2_000 + b'"}')
    allowed.check(put, {}, now_ms=0)
    with pytest.raises(Overloaded, match="token_bytes_per_s"):
        allowed.check(put, {}, now_ms=0)


def test_reschedule_waits_for_the_byte_ration():
    """A reschedule counts no bytes here, or a slow token's would be refused for its own bytes when its message is
    found. The rewritten message is counted there (tests/unit/delayserver/test_master.py).
    """
    allowed, move = limits("produce:order", sent=SentBytes(1_000)), packet(Command.RESCHEDULE, b'{"subject": "order"}')
    for _ in range(1_000):
        allowed.check(move, {}, now_ms=0)
    allowed.check(packet(Command.PRODUCE, bytes(produce("order").body) + bytes(999)), {}, now_ms=0)
    with pytest.raises(Overloaded, match="token_bytes_per_s"):
        allowed.check(move, {}, now_ms=0)
    with pytest.raises(MissingRight):
        allowed.check(packet(Command.RESCHEDULE, b'{"subject": "paid"}'), {}, now_ms=0)
    allowed.check(packet(Command.CANCEL, b'{"subject": "order"}'), {}, now_ms=0)


def test_recurring_schedule_counts_as_a_new_subject():
    allowed = limits(per_minute=1)
    for number in range(3):
        allowed.check(packet(Command.RECUR, b'{"subject": "a", "message": ""}'), {}, now_ms=number)
    with pytest.raises(Overloaded, match="new_subjects_per_minute"):
        allowed.check(packet(Command.RECUR, b'{"subject": "b", "message": ""}'), {}, now_ms=3)
    allowed.check(packet(Command.RECUR, b'{"subject": "known", "message": ""}'), {"known": 1}, now_ms=4)


@pytest.mark.parametrize(
    ("bounds", "limit"), [({"per_minute": 2}, "new_subjects_per_minute"), ({"in_all": 2}, "new_subjects_max")]
)
def test_refusal_names_the_setting(bounds, limit):
    allowed = limits(**bounds)
    for name in ("a", "b"):
        allowed.check(produce(name), {}, now_ms=0)
    with pytest.raises(Overloaded, match=limit) as caught:
        allowed.check(produce("c"), {}, now_ms=0)
    assert caught.value.limit == limit
