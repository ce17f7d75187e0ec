"""Shell. Producer and delay servers that lose answers, are away and refuse, over real sockets."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

import qmq
from qmq import DelayOutcome, Message, Outcome
from qmq.codec import decode_message, due_of
from qmq.errors import BrokerReadOnly, CallError, InvalidRequest, NoRoute, NotServed
from qmq.remoting.commands import Command
from tests.support.waiting import until_async
from tests.unit.client.world import LocalDelayServer, delay_groups, producer_of

LATER = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
LATER_MS = int(LATER.timestamp()) * 1000


def dues(server: LocalDelayServer, subject: str = "a") -> list[int | None]:
    return [due_of(data) for data in server.subjects[subject]]


async def test_only_delayed_messages_use_delay_groups(broker, server, producer):
    before_ms = time.time_ns() // 1_000_000
    receipt = await producer.send(Message("a", {"n": "1"}), delay=timedelta(minutes=30))
    at_once = await producer.send(Message("a", {"n": "2"}))
    assert receipt.is_stored and receipt.broker_group == "d1" and at_once.broker_group == "g1"
    assert receipt.due_ms is not None and at_once.due_ms is None
    assert before_ms + 1_800_000 <= receipt.due_ms <= time.time_ns() // 1_000_000 + 1_800_000
    assert dues(server) == [receipt.due_ms]
    assert [decode_message(data)["n"] for data in broker.subjects["a"]] == ["2"]


async def test_every_send_call_takes_a_delay(server, producer):
    nowait: list[qmq.Receipt] = []
    producer.send_nowait(Message("a"), nowait.append, at=LATER)
    many = await producer.send_many([Message("a", id=f"m{n}") for n in range(2_500)], at=LATER)
    keyed = await producer.send_many([Message("a"), Message("b", tags={"t"})], at=LATER, key="k")
    ordered = await producer.send_many([Message("a", order_key="x"), Message("a")], at=LATER)
    await producer.flush()
    every = [*nowait, *many, *keyed, *ordered]
    assert len(every) == 2_505
    assert {(receipt.outcome, receipt.broker_group, receipt.due_ms) for receipt in every} == {
        (Outcome.STORED, "d1", LATER_MS)
    }
    assert dues(server) == [LATER_MS] * 2_504 and dues(server, "b") == [LATER_MS]
    assert decode_message(server.subjects["b"][0])["qmq_delayKey"] == "k"
    assert server.attempts[-1].labels or server.attempts[-2].labels, "order keys reach the delay server"


async def test_refused_receipt_has_the_due_time(server, producer):
    receipts = await producer.send_many([Message("a", {"qmq_x": 1}), Message("a")], at=LATER)
    assert [(receipt.outcome, receipt.due_ms) for receipt in receipts] == [
        (Outcome.REFUSED, LATER_MS),
        (Outcome.STORED, LATER_MS),
    ]


async def test_missing_delay_group_shows_the_remedy(metaserver, broker):
    async with producer_of(metaserver, timeout_s=1.5) as producer:
        receipt = await producer.send(Message("a"), delay=5)
        assert receipt.outcome is Outcome.REFUSED and isinstance(receipt.error, NoRoute)
        assert "AddBroker" in receipt.reason and receipt.due_ms is not None
        with pytest.raises(NoRoute, match="AddBroker"):
            await producer.cancel(subject="a", id="x")
        assert not broker.attempts


async def test_naive_datetimes_are_refused_before_anything_is_sent(broker, server, producer):
    naive = datetime(2040, 1, 1)
    for call in (
        lambda: producer.send(Message("a"), at=naive),
        lambda: producer.send_nowait(Message("a"), print, at=naive),
        lambda: producer.send_many([Message("a")], at=naive),
        lambda: producer.reschedule(subject="a", id="x", at=naive),
    ):
        with pytest.raises(InvalidRequest, match="time zone"):
            await call()
    with pytest.raises(InvalidRequest, match="commit"):
        await producer.send(Message("a"), session=object(), delay=1)  # type: ignore[call-overload]
    assert not broker.attempts and not server.attempts


async def test_receipt_cancels_at_its_group(metaserver, broker):
    async with delay_groups(metaserver, broker, "d1", "d2") as servers, producer_of(metaserver) as producer:
        receipt = await producer.send(Message("a"), at=LATER)
        assert await producer.cancel(receipt) is DelayOutcome.CANCELLED
        (asked,) = [server for server in servers if server.asked]
        assert asked.name == receipt.broker_group and asked.subjects["a"] == []
        assert asked.asked[0].due_ms == LATER_MS


@pytest.mark.parametrize("by", ["id", "key"])
async def test_without_a_receipt_all_delay_groups_are_asked(by, metaserver, broker):
    async with delay_groups(metaserver, broker, "d1", "d2") as servers, producer_of(metaserver) as producer:
        receipt = await producer.send(Message("a"), at=LATER, key="order-42")
        names = {"id": receipt.message_id} if by == "id" else {"key": "order-42"}
        assert await producer.reschedule(subject="a", delay=5, **names) is DelayOutcome.RESCHEDULED
        assert await producer.cancel(subject="a", **names) is DelayOutcome.CANCELLED
        assert [len(server.asked) for server in servers] == [2, 2]
        assert await producer.cancel(subject="other", **names) is DelayOutcome.UNKNOWN


async def test_sent_message_returns_sent(broker, server, producer):
    receipt = await producer.send(Message("a"), delay=0)
    await until_async(lambda: broker.subjects["a"])
    assert await producer.cancel(receipt) is DelayOutcome.SENT
    assert await producer.reschedule(receipt, at=LATER) is DelayOutcome.SENT


async def test_a_lost_answer_is_asked_for_again(server, producer):
    receipt = await producer.send(Message("a"), at=LATER)
    server.lose_answer(Command.CANCEL)
    assert await producer.cancel(receipt) is DelayOutcome.CANCELLED
    assert len(server.asked) == 2


async def test_readonly_delay_group_is_retried(server, producer):
    receipt = await producer.send(Message("a"), at=LATER)
    server.refuse_recall_with = BrokerReadOnly("slave_down")
    asking = asyncio.create_task(producer.cancel(receipt))
    await until_async(lambda: len(server.asked) >= 2)
    server.refuse_recall_with = None
    assert await asking is DelayOutcome.CANCELLED


async def test_silent_delay_group_prevents_unknown(metaserver, broker):
    async with (
        delay_groups(metaserver, broker, "d1", "d2") as servers,
        producer_of(metaserver, timeout_s=4.0, answer_timeout_s=0.4) as producer,
    ):
        servers[1].is_silent = True
        with pytest.raises(NotServed, match="d2"):
            await producer.cancel(subject="a", id="nobody knows it")
        assert len(servers[1].asked) > 1, "it was asked again on a new connection"


async def test_delay_server_refusal_is_raised(server, producer):
    receipt = await producer.send(Message("a"), at=LATER)
    server.refuse_recall_with = InvalidRequest("due in 9999 days; this delay server takes at most 730")
    with pytest.raises(CallError, match="at most 730"):
        await producer.reschedule(receipt, delay=timedelta(days=9999))


async def test_closing_waits_for_delayed_messages_too(metaserver, server):
    receipts: list[qmq.Receipt] = []
    async with producer_of(metaserver) as producer:
        producer.send_nowait(Message("a"), receipts.append, at=LATER)
    assert [receipt.outcome for receipt in receipts] == [Outcome.STORED] and len(server.subjects["a"]) == 1
