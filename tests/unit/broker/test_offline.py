"""Core. Switched-off consumers get no messages, at once and after a restart, until they are switched on."""

from __future__ import annotations

import json

import pytest

from qmq.broker.service_queue import OfflineRules
from qmq.errors import ErrorCode
from qmq.replication.assignment import Address, Assignment
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.world import Group

RULES = [("s", "g", "c"), ("*", "g", "c"), ("s", "*", "c"), ("s", "g", "*"), ("*", "*", "c"), ("*", "*", "*")]


@pytest.mark.parametrize("rule", RULES, ids="/".join)
def test_consumer_that_is_switched_off_waits_and_is_served_once_it_is_switched_on(rule):
    group = Group.made().start()
    consumer = group.subscribed("c")
    group.a.assign(Role.MASTER, offline=(rule,))
    pull = consumer.pull(timeout_ms=60_000)
    group.client().produce("m0")
    group.settle()
    assert not consumer.answered(pull)
    group.a.assign(Role.MASTER)
    group.settle()
    assert consumer.ids(pull) == ["m0"]


@pytest.mark.parametrize("rule", [("t", "g", "c"), ("s", "other", "*"), ("*", "*", "d")], ids="/".join)
def test_others_are_served(rule):
    assert ("s", "g", "c") not in OfflineRules([rule])
    group = Group.made().start()
    consumer = group.subscribed("c")
    group.a.assign(Role.MASTER, offline=(rule,))
    group.client().produce("m0")
    assert consumer.take() == ["m0"]


@pytest.mark.parametrize("derived", [retry_subject("s", "g"), dead_letter_subject("s", "g")])
def test_consumer_that_is_switched_off_is_handed_no_retries_of_the_subject_either(derived):
    key = (derived, "g", "c")
    assert key in OfflineRules([("s", "g", "c")]) and key in OfflineRules([(derived, "g", "*")])
    assert key not in OfflineRules([("t", "g", "c")])


def test_pull_of_a_consumer_that_is_switched_off_ends_with_no_message_in_time():
    group = Group.made().start()
    consumer = group.subscribed("c")
    group.a.assign(Role.MASTER, offline=(("s", "g", "c"),))
    group.client().produce("m0")
    at_once, later = consumer.pull(), consumer.pull(timeout_ms=500)
    group.settle()
    assert consumer.code(at_once) == ErrorCode.NO_MESSAGE and not consumer.answered(later)
    group.a.wait(500)
    assert consumer.code(later) == ErrorCode.NO_MESSAGE


def test_offline_consumer_keeps_and_acks_its_messages():
    group = Group.made().start()
    group.client().produce("m0", "m1")
    consumer, other = group.subscribed("c"), group.subscribed("o")
    pull = consumer.pull()
    group.settle()
    begin = consumer.pulled(pull)[0][0]
    group.a.assign(Role.MASTER, offline=(("s", "g", "c"),))
    acked = consumer.ack(begin, begin + 1)
    elsewhere = other.pull()
    group.settle()
    assert consumer.code(acked) == ErrorCode.SUCCESS and other.code(elsewhere) == ErrorCode.NO_MESSAGE
    assert group.progress.consumers["c"].unacked_messages == 1


def test_offline_consumer_waits_for_lost_messages_too():
    group = Group.made().start()
    group.client().produce("m0")
    consumer = group.subscribed("c")
    consumer.pull()
    group.settle()
    consumer.lost()
    group.a.assign(Role.MASTER, offline=(("s", "g", "c"),))
    again = group.subscribed("c")
    pull = again.pull(timeout_ms=60_000)
    group.settle()
    assert not again.answered(pull)
    group.a.assign(Role.MASTER)
    group.settle()
    assert again.ids(pull) == ["m0"]


def test_consumer_stays_switched_off_after_a_restart_without_the_metaserver():
    group = Group.made().start()
    group.client().produce("m0")
    group.a.assign(Role.MASTER, offline=(("s", "g", "c"),))
    group.settle()
    group.cut()
    group.a.crash()
    assert group.a.node.start_without_metaserver()
    group.connect()
    group.settle()
    consumer = group.subscribed("c")
    pull = consumer.pull()
    group.settle()
    assert consumer.code(pull) == ErrorCode.NO_MESSAGE


def test_assignment_of_a_file_from_before_there_were_switches_is_read():
    fields = Assignment("g1", 1, Role.MASTER).to_json()
    del fields["offline"]
    assert Assignment.from_json(fields).offline == ()


def test_assignment_of_a_file_from_when_there_was_one_slave_is_read():
    place = Address("10.0.0.2", 1, 2, 3)
    fields = Assignment("g1", 1, Role.MASTER, slaves=(place,)).to_json()
    fields["slave"], _ = fields.pop("slaves")[0], fields.pop("min_copies")
    assert Assignment.from_json(fields) == Assignment("g1", 1, Role.MASTER, slaves=(place,), min_copies=2)
    fields["slave"] = None
    assert Assignment.from_json(fields).slaves == ()


def test_assignment_is_read_as_it_was_written():
    slaves = Address("10.0.0.2", 1, 2, 3), Address("10.0.0.3", 1, 2, 3)
    written = Assignment("g1", 1, Role.SLAVE, Address("10.0.0.1", 1, 2, 3), slaves, min_copies=3)
    assert Assignment.from_json(json.loads(json.dumps(written.to_json()))) == written
