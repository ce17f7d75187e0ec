"""Core. Switched-off consumers get no messages, at once and after a restart, until they are switched on."""

from __future__ import annotations

import pytest

from qmq.broker.serving import OfflineRules
from qmq.errors import ErrorCode
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.world import Group

RULE = ("s", "g", "c")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (RULE, True),
        (("*", "g", "c"), True),
        (("s", "*", "c"), True),
        (("s", "g", "*"), True),
        (("*", "*", "c"), True),
        (("*", "*", "*"), True),
        (("t", "g", "c"), False),
        (("s", "other", "*"), False),
        (("*", "*", "d"), False),
    ],
    ids=str,
)
def test_rules_match_consumers(rule, expected):
    assert (RULE in OfflineRules([rule])) is expected


@pytest.mark.parametrize("derived", [retry_subject("s", "g"), dead_letter_subject("s", "g")])
def test_rules_match_derived_subjects(derived):
    key = (derived, "g", "c")
    assert key in OfflineRules([RULE]) and key in OfflineRules([(derived, "g", "*")])
    assert key not in OfflineRules([("t", "g", "c")])


def test_offline_consumer_is_served_once_switched_on():
    group = Group.made().start()
    consumer, other = group.subscribed("c"), group.subscribed("d", group="other")
    group.a.assign(Role.MASTER, offline=(RULE,))
    group.client().store("m0")
    at_once, later, waiting = consumer.pull(), consumer.pull(timeout_ms=500), consumer.pull(timeout_ms=60_000)
    group.a.wait(500)
    assert consumer.code(at_once) == consumer.code(later) == ErrorCode.NO_MESSAGE
    assert other.take() == ["m0"] and not consumer.answered(waiting)
    group.a.assign(Role.MASTER)
    group.settle()
    assert consumer.ids(waiting) == ["m0"]


def test_offline_consumer_keeps_its_messages():
    group = Group.made().start()
    group.client().produce("m0", "m1")
    consumer, other = group.subscribed("c"), group.subscribed("o")
    consumer.take()
    group.a.assign(Role.MASTER, offline=(RULE,))
    consumer.acked("m0")
    assert other.take() == [] and group.progress.consumers["c"].unacked_messages == 1
    consumer.lost()
    again = group.subscribed("c")
    waiting = again.pull(timeout_ms=60_000)
    group.settle()
    assert not again.answered(waiting), "redelivery waits, too"
    group.a.assign(Role.MASTER)
    group.settle()
    assert again.ids(waiting) == ["m1"]


def test_consumer_stays_offline_after_a_restart():
    group = Group.made().start()
    group.client().produce("m0")
    group.a.assign(Role.MASTER, offline=(RULE,))
    group.settle()
    group.cut()
    group.a.crash()
    assert group.a.node.start_without_metaserver()
    group.agree()
    assert group.subscribed("c").take() == []
