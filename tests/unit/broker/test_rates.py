"""Core. Rates of consumer groups: buckets, empty buckets, new limits, and delivery at a rate."""

from __future__ import annotations

import pytest

from qmq.broker.group_status import Cause
from qmq.broker.serving import DRY_MS, Rates
from qmq.operator_limits import OperatorLimits, by_key
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.limited import KEY, started
from tests.unit.broker.world import Client, Group


def limit(rates: Rates, now_ms: int, *limits: OperatorLimits) -> None:
    rates.limit(by_key(limits), now_ms)


def limited(per_second: int, now_ms: int = 1_000) -> Rates:
    rates = Rates()
    limit(rates, now_ms, OperatorLimits(*KEY, per_second=per_second))
    return rates


def test_bucket_begins_with_one_message_and_fills():
    rates = limited(10)
    assert [rates.allows(KEY, now_ms) for now_ms in (1_000, 1_100, 1_200, 1_300, 9_000)] == [1, 2, 3, 3, 3]
    assert not rates.has_dry and not rates.is_slowed(KEY, 9_000)


def test_spent_tokens_return_with_time():
    rates = limited(4)
    rates.spend(KEY, 1)
    assert [rates.allows(KEY, now_ms) for now_ms in (1_000, 1_125, 1_249, 1_250)] == [0, 0, 0, 1]


def test_empty_bucket_is_served_once_and_marked_slow():
    rates, mailbox = limited(10), (retry_subject("s", "g"), "g")
    rates.spend(KEY, 1)
    assert [rates.allows(mailbox, 1_010), rates.allows(KEY, 1_020), rates.has_dry] == [0, 0, True]
    assert rates.take_dry() == [mailbox, KEY], "each under the subject that it asked for"
    assert rates.take_dry() == [] and not rates.has_dry
    assert [rates.is_slowed(KEY, 1_020 + DRY_MS + ms) for ms in (-1, 0)] == [True, False]


@pytest.mark.parametrize(
    "key", [("s", "h"), ("t", "g"), (dead_letter_subject("s", "g"), "g")], ids=["group", "subject", "dead letters"]
)
def test_others_have_no_bucket(key):
    rates = limited(10)
    rates.spend(key, 5)
    assert rates.allows(key, 1_000) is None and not rates.is_slowed(key, 1_000)
    assert rates.allows(KEY, 1_000) == 1


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([OperatorLimits(*KEY, per_second=10)], 0),
        ([OperatorLimits(*KEY, per_second=20)], 1),
        ([OperatorLimits(*KEY, dead_letters_to="t")], None),
        ([], None),
    ],
    ids=["the same rate", "another rate", "no rate", "no limit"],
)
def test_changed_rate_begins_anew(after, expected):
    rates = limited(10)
    rates.spend(KEY, 1)
    limit(rates, 1_050, *after)
    assert rates.allows(KEY, 1_050) == expected


# Delivery.


def messages_in(group: Group, client: Client, seconds: float, **terms) -> int:
    """Return the messages that a consumer with constant demand gets in this number of seconds."""
    got, opaque = 0, client.pull(timeout_ms=60_000, **terms)
    for _ in range(int(seconds * 10)):
        group.wait(100)
        while client.answered(opaque):
            got += len(client.pulled(opaque))
            opaque = client.pull(timeout_ms=60_000, **terms)
            group.settle()
    return got


@pytest.mark.parametrize("per_second", [1, 7, 100])
def test_rate_limits_messages_per_second(per_second):
    group, client = started(OperatorLimits("s", "g", per_second=per_second))
    for _ in range(12):
        client.store(*(f"m{number}" for number in range(100)))
    assert abs(messages_in(group, client, 10) - 10 * per_second) <= 1 + 0.2 * per_second
    assert Cause.RATE in group.a.master.causes.of(KEY)
    group.a.assign(Role.MASTER)
    group.settle()
    client.take(most=500)
    assert client.answered(client.last_pull)
    group.a.wait(3_000)
    assert Cause.RATE not in group.a.master.causes.of(KEY)


@pytest.mark.parametrize("subjects", [("s", "s"), ("s", retry_subject("s", "g"))], ids=["alone", "with retry subject"])
def test_consumers_of_a_group_share_its_rate(subjects):
    group, _ = started(OperatorLimits("s", "g", per_second=10))
    consumers = [group.subscribed(name, subject=subject) for name, subject in zip("de", subjects, strict=True)]
    other = group.subscribed("o", group="other")
    for subject in set(subjects):
        other.store(*(f"m{number}" for number in range(100)), subject=subject)
    assert len(other.take()) == 100, "another group has no rate"
    got = [0, 0]
    waiting = [consumer.pull(timeout_ms=60_000, most=1) for consumer in consumers]
    for _ in range(50):
        group.wait(100)
        for at, consumer in enumerate(consumers):
            while consumer.answered(waiting[at]):
                got[at] += 1
                waiting[at] = consumer.pull(timeout_ms=60_000, most=1)
                group.settle()
    assert 48 <= sum(got) <= 52 and min(got) > 15
