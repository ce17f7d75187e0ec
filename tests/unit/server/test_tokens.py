"""Core. What a broker remembers of tokens, and what it lets a connection do."""

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


def test_every_method_of_the_control_port_names_the_role_it_needs():
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["Broker"].methods}
    assert methods == set(CONTROL_ROLES) and all(CONTROL_ROLES.values())


def test_what_changes_a_broker_needs_the_key_of_the_installation():
    for method in ("PrepareSwap", "CancelSwap", "ResetOffset"):
        assert CONTROL_ROLES[method] == {TokenRole.CLUSTER}


def test_a_scope_decides_what_is_produced_and_what_is_consumed():
    allowed = limits("produce:order", "consume:paid.*")
    allowed.check(produce("order"), {}, now_ms=0)
    allowed.check(subscribe("paid.card"), {}, now_ms=0)
    with pytest.raises(MissingRight, match="may not produce to 'paid.card'"):
        allowed.check(produce("paid.card"), {}, now_ms=0)
    with pytest.raises(MissingRight, match="may not consume from 'order'"):
        allowed.check(subscribe("order"), {}, now_ms=0)


@pytest.mark.parametrize("group", ["billing", "shipping"])
def test_a_consumer_forges_no_message_into_a_groups_mailbox_or_its_dead_letters(group):
    """What a consume-only token stored in %RETRY%order%billing was handed to the handler of billing."""
    allowed = limits("consume:order")
    with pytest.raises(MissingRight, match=f"may not produce to '%RETRY%order%{group}': that needs redrive:order"):
        allowed.check(produce(f"%RETRY%order%{group}"), {}, now_ms=0)
    with pytest.raises(MissingRight, match="brokers alone write dead letters"):
        allowed.check(produce(f"%DEAD_RETRY%order%{group}"), {}, now_ms=0)
    limits("consume:order", "redrive:order").check(produce(f"%RETRY%order%{group}"), {}, now_ms=0)


@pytest.mark.parametrize("command", [Command.CANCEL, Command.RESCHEDULE, Command.RECUR])
def test_a_consumer_changes_no_delayed_message_of_a_mailbox(command):
    with pytest.raises(MissingRight):
        limits("consume:order").check(packet(command, b'{"subject": "%RETRY%order%billing"}'), {}, now_ms=0)


@pytest.mark.parametrize("command", [Command.CANCEL, Command.RESCHEDULE, Command.RECUR])
def test_delayed_messages_are_changed_by_those_who_may_send_them(command):
    allowed = limits("produce:order", "consume:paid")
    allowed.check(packet(command, b'{"subject": "order"}'), {}, now_ms=0)
    with pytest.raises(MissingRight, match="may not produce to 'paid'"):
        allowed.check(packet(command, b'{"subject": "paid"}'), {}, now_ms=0)


def test_a_subject_that_was_refused_is_refused_again():
    allowed = limits("order")
    for _ in range(3):
        with pytest.raises(MissingRight):
            allowed.check(produce("other"), {}, now_ms=0)
        allowed.check(produce("order"), {}, now_ms=0)


def test_new_subjects_are_rationed_and_known_ones_are_not():
    """Weakness 31: anyone could fill the tables."""
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
def test_what_does_not_parse_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        limits().check(wrong, {}, now_ms=0)


@pytest.mark.parametrize("role", TokenRole)
def test_each_port_has_its_roles(role):
    caller = Caller("x", role, Scope(groups=("g1",)))
    for check, allowed in ((check_client, {"client", "cluster"}), (check_broker, {"broker", "cluster"})):
        if role in allowed:
            check(caller, "g1")
            with pytest.raises(MissingRight, match="broker group 'g2'"):
                check(caller, "g2")
        else:
            with pytest.raises(MissingRight, match="role"):
                check(caller, "g1")


def test_the_cache_is_bounded_and_forgets_refused_tokens_first():
    cache = TokenCache("own")
    cache.accepted("good", Caller("shop", TokenRole.CLIENT), valid_ms=10, expires_in_ms=0, now_ms=0)
    for number in range(KNOWN_MAX + 10):
        cache.refused(f"wrong{number}", "no", now_ms=0)
    assert len(cache._known) <= KNOWN_MAX and cache.fallback("good", now_ms=0) is not None


def test_bytes_are_counted_over_all_connections_of_a_token_and_only_those_it_may_send():
    sent, batch = SentBytes(1_000), produce("order")
    one, other = limits("produce:order", sent=sent), limits("produce:order", sent=sent)
    with pytest.raises(MissingRight):
        one.check(packet(Command.PRODUCE, produce_header(1, 1, 0, 0, "paid") + bytes(9_999)), {}, now_ms=0)
    one.check(packet(Command.PRODUCE, bytes(batch.body) + bytes(999)), {}, now_ms=0)
    with pytest.raises(Overloaded) as caught:
        other.check(batch, {}, now_ms=0)
    assert caught.value.limit == "token_bytes_per_s"
    other.check(packet(Command.PULL, b""), {}, now_ms=0)


def test_a_recurring_schedule_counts_as_what_is_produced():
    """Each put of another one is written to both logs with its message."""
    allowed = limits("produce:order", sent=SentBytes(1_000))
    put = packet(Command.RECUR, b'{"subject": "order", "message": "' + b"x" * 2_000 + b'"}')
    allowed.check(put, {}, now_ms=0)
    with pytest.raises(Overloaded, match="token_bytes_per_s"):
        allowed.check(put, {}, now_ms=0)


def test_a_reschedule_is_refused_while_what_its_token_sent_is_not_paid_for():
    """By itself it counts nothing here, or a slow token's would be refused for its own bytes when its message is found:
    what it writes anew is counted there (tests/unit/delayserver/test_master.py)."""
    allowed, move = limits("produce:order", sent=SentBytes(1_000)), packet(Command.RESCHEDULE, b'{"subject": "order"}')
    for _ in range(1_000):
        allowed.check(move, {}, now_ms=0)
    allowed.check(packet(Command.PRODUCE, bytes(produce("order").body) + bytes(999)), {}, now_ms=0)
    with pytest.raises(Overloaded, match="token_bytes_per_s"):
        allowed.check(move, {}, now_ms=0)
    with pytest.raises(MissingRight):
        allowed.check(packet(Command.RESCHEDULE, b'{"subject": "paid"}'), {}, now_ms=0)
    allowed.check(packet(Command.CANCEL, b'{"subject": "order"}'), {}, now_ms=0)


def test_a_recurring_schedule_of_a_new_subject_counts_as_one():
    allowed = limits(per_minute=1)
    for number in range(3):
        allowed.check(packet(Command.RECUR, b'{"subject": "a", "message": ""}'), {}, now_ms=number)
    with pytest.raises(Overloaded, match="new_subjects_per_minute"):
        allowed.check(packet(Command.RECUR, b'{"subject": "b", "message": ""}'), {}, now_ms=3)
    allowed.check(packet(Command.RECUR, b'{"subject": "known", "message": ""}'), {"known": 1}, now_ms=4)


@pytest.mark.parametrize(
    ("bounds", "limit"), [({"per_minute": 2}, "new_subjects_per_minute"), ({"in_all": 2}, "new_subjects_max")]
)
def test_a_refusal_names_the_setting_whose_bound_was_reached(bounds, limit):
    allowed = limits(**bounds)
    for name in ("a", "b"):
        allowed.check(produce(name), {}, now_ms=0)
    with pytest.raises(Overloaded, match=limit) as caught:
        allowed.check(produce("c"), {}, now_ms=0)
    assert caught.value.limit == limit
