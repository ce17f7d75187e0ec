"""Shell. Recurring schedules in virtual time: the delay server's real cores behind real clients."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import qmq.blocking
from qmq import Message
from qmq.errors import CallError
from tests.unit.testing.test_delays import broker, producer_of

__all__ = ["broker"]

MINUTELY = {"name": "minutely", "cron": "* * * * *", "timezone": "UTC"}


def pass_first(broker, schedule):
    """Advance to half a minute after the first occurrence: no minute begins while the test runs on from there."""
    broker.advance((schedule.next_at - datetime.now(UTC)).total_seconds() + 30)


async def test_each_occurrence_is_one_message(broker):
    async with producer_of(broker) as producer:
        before, template = datetime.now(UTC), Message("s", {"n": "1"}, tags={"t"}, order_key="k", body=b"\xff\0")
        schedule = await producer.put_recurring(template, **MINUTELY, owner="ops")
        assert before < schedule.next_at <= datetime.now(UTC) + timedelta(minutes=1)
        pass_first(broker, schedule)
        broker.advance(540)
        messages = broker.messages("s")
        assert len(messages) == 10 and len({message.id for message in messages}) == 10
        for message in messages:
            assert (message["n"], message.body, message["qmq_recurOwner"]) == ("1", b"\xff\0", "ops")
            assert (message.tags, message.order_key) == ({"t"}, "k")
        created = [message.created_ms for message in messages]
        assert created == list(range(schedule.due_ms, schedule.due_ms + 600_000, 60_000))


def test_program_without_event_loop_has_the_same(broker):
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="nightly", timeout_s=5.0) as producer:
        schedule = producer.put_recurring(Message("s"), **MINUTELY)
        assert schedule.owner == "nightly"
        assert [one.name for one in producer.list_recurring(subject="s")] == ["minutely"]
        pass_first(broker, schedule)
        assert len(broker.messages("s")) == 1
        assert producer.delete_recurring(subject="s", name="minutely") is True
        with pytest.raises(CallError, match="Bad minute"):
            producer.put_recurring(Message("s"), **MINUTELY | {"cron": "60 * * * *"})
