"""Core. Arguments of listeners and pullers, and decisions on failed messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import qmq
from qmq.client.terms import (
    DELAY_S_MAX,
    RetryPolicy,
    Terms,
    batch_of,
    check_delay,
    make_terms,
    refused,
    refused_by_error,
    refused_for_good,
)
from qmq.errors import DeadLetter, InvalidMessage, InvalidRequest, RetryLater
from qmq.remoting.commands import Verdict
from tests.unit.client.world import TOKEN

GOOD = {
    "subject": "a",
    "group": "g",
    "consumer": "c1",
    "broadcast": False,
    "start": "latest",
    "tags": (),
    "tag_mode": "any",
    "retries_max": 32,
    "retry_delay": 5.0,
    "most_once": False,
    "prefetch_messages": 10,
    "prefetch_bytes": 10,
    "unacked_max": 10,
}


def terms(**changed: object) -> Terms:
    return make_terms(**(GOOD | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"subject": "a/b"}, qmq.InvalidName),
        ({"subject": "a" * 101}, qmq.InvalidName),
        ({"group": "g" * 101}, qmq.InvalidName),
        ({"group": "g\n"}, qmq.InvalidName),
        ({"start": "yesterday"}, qmq.InvalidRequest),
        ({"start": datetime(2026, 1, 1)}, qmq.InvalidRequest),
        ({"tags": "pay"}, qmq.InvalidRequest),
        ({"tags": [1, "pay"]}, qmq.InvalidRequest),
        ({"tags": [str(n) for n in range(11)]}, qmq.InvalidRequest),
        ({"tag_mode": "none"}, qmq.InvalidRequest),
        ({"retries_max": -1}, qmq.InvalidRequest),
        ({"retry_delay": -1.0}, qmq.InvalidRequest),
        ({"retry_delay": 86_401.0}, qmq.InvalidRequest),
        ({"prefetch_messages": 0}, qmq.InvalidRequest),
        ({"prefetch_bytes": 0}, qmq.InvalidRequest),
        ({"unacked_max": 0}, qmq.InvalidRequest),
    ],
)
def test_wrong_terms_are_refused(changed, error):
    with pytest.raises(error):
        terms(**changed)


def test_a_moment_becomes_ms():
    assert (terms(start=datetime(1970, 1, 1, 0, 0, 1, 5000, UTC)).start, terms().start) == ("since", "latest")
    assert terms(start=datetime(1970, 1, 1, 0, 0, 1, 5000, UTC)).since_ms == 1005


@pytest.mark.parametrize("changed", [{"group": None}, {"group": None, "broadcast": True}])
def test_broadcast_is_its_own_group(changed):
    assert (terms(**changed).group, terms(**changed).broadcast, terms(**changed).mailbox) == ("c1", True, None)


def test_mailbox_needs_a_real_subject():
    assert terms().mailbox == "%RETRY%a%g"
    assert terms(subject="%RETRY%a%g").mailbox is None
    assert terms(subject="%DEAD_RETRY%a%g").mailbox is None


def test_delivery_limits_have_bounds():
    limits = [terms(retries_max=retries).policy.deliveries_max for retries in (0, 1, 32)]
    assert limits == [1, 1, 32]
    assert terms(subject="%DEAD_RETRY%a%g").policy.deliveries_max == 0


def consumer() -> qmq.Consumer:
    return qmq.Consumer(metaserver="http://127.0.0.1:1", app="test", token=TOKEN, consumer_id="c1")


async def handle(message: qmq.ReceivedMessage) -> None:
    """Nothing."""


def test_a_place_in_a_group_is_given_once():
    client = consumer()
    client.listen("a", group="g")(handle)
    for again in (
        lambda: client.listen("a", group="g"),
        lambda: client.pull("a", group="g"),
        lambda: client.listen("%RETRY%a%g", group="g"),
    ):
        with pytest.raises(qmq.InvalidRequest, match="already"):
            again()
    client.listen("a", group="other")(handle)
    client.listen("a", broadcast=True)(handle)
    assert list(client.listeners) == [("a", "g"), ("a", "other"), ("a", "c1")]


NOW = datetime(2026, 5, 1, tzinfo=UTC)
POLICY = RetryPolicy(deliveries_max=3, delay_s=5.0)
RETRY, DEAD = Verdict.RETRY, Verdict.DEAD_LETTER


class Handed:
    """Message with a number of deliveries."""

    def __init__(self, times: int, own: str | None = None) -> None:
        self.times = times
        self.properties = {} if own is None else {"qmq_maxRetryNum": own}


class Broken:
    times = 2

    @property
    def properties(self) -> dict[str, str]:
        raise InvalidMessage("garbage")


@pytest.mark.parametrize(
    ("times", "own", "expected"),
    [
        pytest.param(1, None, RETRY, id="the first of three"),
        pytest.param(2, None, RETRY, id="the second of three"),
        pytest.param(3, None, DEAD, id="the third of three"),
        pytest.param(40, None, DEAD, id="more often than allowed"),
        pytest.param(3, "5", RETRY, id="the message allows more"),
        pytest.param(5, "5", DEAD, id="as often as the message allows"),
        pytest.param(1, "1", DEAD, id="the message allows one"),
        pytest.param(1, "0", DEAD, id="no retry is one delivery"),
        pytest.param(2, "-1", RETRY, id="the message says nothing, as QMQ writes it"),
        pytest.param(3, "many", DEAD, id="what the message says is no number"),
        pytest.param(40, "9" * 30, RETRY, id="a limit above all integers of a packet"),
        pytest.param(40, "9" * 5_000, RETRY, id="a limit with more digits than Python reads"),
    ],
)
def test_last_failed_delivery_makes_a_dead_letter(times, own, expected):
    assert refused_by_error(Handed(times, own), POLICY, ValueError("x"), NOW).verdict == expected


@pytest.mark.parametrize(
    ("error", "delay_s", "is_failure"),
    [
        pytest.param(ValueError("x"), 5.0, True, id="any exception: the listener's delay"),
        pytest.param(RetryLater(0.25), 0.25, False, id="the handler's delay"),
        pytest.param(RetryLater(at=NOW + timedelta(seconds=90)), 90.0, False, id="a moment"),
        pytest.param(RetryLater(at=NOW - timedelta(seconds=90)), 0.0, False, id="a moment that is over"),
        pytest.param(RetryLater(at=NOW + timedelta(days=2)), 5.0, True, id="longer than a broker waits"),
    ],
)
def test_retry_later_sets_the_delay(error, delay_s, is_failure):
    decision = refused_by_error(Handed(1), POLICY, error, NOW)
    assert (decision.verdict, decision.delay_s, decision.is_failure) == (RETRY, delay_s, is_failure)


@pytest.mark.parametrize(
    ("times", "error", "reason"),
    [
        pytest.param(3, RetryLater(1), "delivered 3 times; retry in 1 s", id="no way around the limit"),
        pytest.param(3, ValueError("x"), "delivered 3 times; ValueError('x')", id="the last delivery"),
        pytest.param(1, DeadLetter("no such order"), "no such order", id="the handler's reason"),
    ],
)
def test_a_dead_letter_has_a_reason(times, error, reason):
    assert refused_by_error(Handed(times), POLICY, error, NOW)[:3] == (DEAD, 0.0, reason)
    assert refused_by_error(Handed(1, "1"), POLICY, ValueError("x"), NOW).reason == "delivered once; ValueError('x')"
    assert refused_for_good(Handed(1), POLICY, "why")[:3] == (DEAD, 0.0, "why")


def test_failing_dead_letter_is_retried_forever():
    without_limit = RetryPolicy(deliveries_max=0, delay_s=5.0)
    for error in (ValueError("x"), DeadLetter("y"), RetryLater(5.0)):
        assert refused_by_error(Handed(1_000, "3"), without_limit, error, NOW)[:2] == (RETRY, 5.0)


def test_unreadable_message_fails_normally():
    assert refused_by_error(Broken(), POLICY, InvalidMessage("garbage"), NOW).verdict == RETRY
    assert refused_by_error(Broken(), RetryPolicy(2, 5.0), InvalidMessage("garbage"), NOW).verdict == DEAD


def test_exception_with_failing_repr_has_a_reason():
    class Unspeakable(Exception):
        def __repr__(self) -> str:
            raise ValueError

    assert refused_by_error(Handed(1), POLICY, Unspeakable(), NOW).reason == "Unspeakable"
    assert len(refused_by_error(Handed(1), POLICY, ValueError("x" * 100_000), NOW).reason) == 1_000


@pytest.mark.parametrize(
    ("times", "own", "retries_max", "most"),
    [
        (1, None, 32, 100),
        (1, None, 1, 100),
        (2, None, 32, 50),
        (8, None, 32, 1),
        (40, None, 0, 1),
        (2, None, 2, 1),
        (2, "2", 8, 1),
        (2, "8", 2, 50),
    ],
)
def test_lists_shrink_with_each_failure(times, own, retries_max, most):
    assert batch_of(Handed(times, own), RetryPolicy(retries_max, 5.0), 100) == most


@pytest.mark.parametrize("delay", [-0.1, 86_400.1, float("nan"), timedelta(days=2)])
def test_a_delay_is_between_nothing_and_a_day(delay):
    with pytest.raises(InvalidRequest):
        refused(Handed(1), POLICY, "", delay)


def test_mailbox_allows_delays_of_years():
    policy = RetryPolicy(deliveries_max=3, delay_s=5.0, delay_s_max=DELAY_S_MAX)
    assert refused(Handed(1), policy, "", timedelta(days=700)).delay_s == 700 * 86_400
    assert refused_by_error(Handed(1), policy, RetryLater(700 * 86_400), NOW).delay_s == 700 * 86_400
    with pytest.raises(InvalidRequest):
        refused(Handed(1), policy, "", DELAY_S_MAX + 1)


def test_a_day_is_a_delay():
    assert check_delay(86_400) == 86_400
    assert refused(Handed(1), POLICY, "", timedelta(minutes=1)).delay_s == 60
