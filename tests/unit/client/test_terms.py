"""Core. Arguments of listeners and pullers, rejected at once."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

import qmq
from qmq.client.terms import Terms, make_terms
from tests.unit.client.fakes import TOKEN

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
        ({"subject": ""}, qmq.InvalidName),
        ({"subject": "a/b"}, qmq.InvalidName),
        ({"subject": "a" * 101}, qmq.InvalidName),
        ({"group": "g" * 101}, qmq.InvalidName),
        ({"group": "g\n"}, qmq.InvalidName),
        ({"start": "yesterday"}, qmq.InvalidRequest),
        ({"start": datetime(2026, 1, 1)}, qmq.InvalidRequest),
        ({"tags": "pay"}, qmq.InvalidRequest),
        ({"tags": ["pay", ""]}, qmq.InvalidRequest),
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


@pytest.mark.parametrize("changed", [{"group": ""}, {"group": "", "broadcast": True}])
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
    one = consumer()
    one.listen("a", group="g")(handle)
    for again in (
        lambda: one.listen("a", group="g"),
        lambda: one.pull("a", group="g"),
        lambda: one.listen("%RETRY%a%g", group="g"),
    ):
        with pytest.raises(qmq.InvalidRequest, match="already"):
            again()
    one.listen("a", group="other")(handle)
    one.listen("a", broadcast=True)(handle)
    assert list(one.listeners) == [("a", "g"), ("a", "other"), ("a", "c1")]


@pytest.mark.parametrize("concurrency", [0, -1, 10_001])
def test_concurrency_has_its_bounds(concurrency):
    one = consumer()
    with pytest.raises(qmq.InvalidRequest):
        one.listen("a", group="g", concurrency=concurrency, prefetch_messages=1)(handle)
    one.listen("a", group="g")(handle)
    with pytest.raises(qmq.InvalidRequest):
        one.listeners["a", "g"].concurrency = concurrency
