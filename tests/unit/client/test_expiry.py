"""Shell. Expiring messages: no handler gets them, and brokers get a report."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

import qmq
from qmq.client.received import ReceivedMessage
from qmq.codec import batch_encoder, decode_message, delayed_encoder, encode_message
from qmq.errors import InvalidMessage
from qmq.message import Message
from qmq.remoting.commands import Command, Verdict
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import LocalBroker, consumer_of, handled_by, ns

DAY_S = 86_400


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def fill_expiring(broker: LocalBroker, sent_s_ago: float, expires: dict[int, float], count: int = 10) -> None:
    """Return ten messages sent some seconds ago, some of which have expired."""
    encode = batch_encoder("a", now_ms() - int(sent_s_ago * 1000))
    for number in range(count):
        broker.add("a", encode(Message("a", {"n": str(number)}, id=f"m{number}", expires_after=expires.get(number))))


def verdicts(broker: LocalBroker) -> list[int]:
    return [entry.verdict for nack in broker.nacks for entry in nack.entries for _ in range(entry.begin, entry.end)]


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("most_once", [False, True])
async def test_expired_message_is_reported_not_handled(batch, most_once, consumer, broker):
    fill_expiring(broker, 60, {2: 30, 3: 59, 4: DAY_S, 9: 1})
    handled = handled_by(consumer, batch=batch, most_once=most_once)
    async with consuming(consumer):
        await until_async(lambda: len(handled.messages) == 7 and not broker.unacked())
    assert handled.numbers == [0, 1, 4, 5, 6, 7, 8]
    assert verdicts(broker) == [Verdict.EXPIRED] * 3


async def test_message_expires_in_the_buffer(consumer, broker):
    fill_expiring(broker, 0, {1: 0.05}, count=2)
    handled = []

    @consumer.listen("a", group="g", start="earliest")
    async def handle(message: qmq.ReceivedMessage) -> None:
        handled.append(int(message["n"]))
        await asyncio.sleep(0.06)

    async with consuming(consumer):
        await until_async(lambda: verdicts(broker) == [Verdict.EXPIRED])
    assert handled == [0]


@pytest.fixture
def clock(monkeypatch):
    """Client's clock, set by `clock.ahead_s`."""
    moved = SimpleNamespace(ahead_s=0)
    ns_now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: ns_now() + moved.ahead_s * 1_000_000_000)
    return moved


@pytest.mark.parametrize("suspected", [{0}, {1}], ids=["for the one that is alone", "to be alone"])
@pytest.mark.parametrize("batch", [None, 2], ids=["single", "in lists"])
async def test_message_expires_before_its_turn(clock, suspected, batch, consumer, broker):
    broker.suspected = suspected
    fill_expiring(broker, 0, {1: DAY_S}, count=3)
    gate = asyncio.Event()
    began = handled_by(consumer, gate, concurrency=2, batch=batch)
    async with consuming(consumer):
        taken = 3 if batch and suspected == {0} else 2
        await until_async(lambda: began.messages and waiting(consumer) == 3 - taken)
        clock.ahead_s = 2 * DAY_S
        gate.set()
        await until_async(lambda: verdicts(broker) and not broker.unacked())
    assert began.numbers == [0, 2] and verdicts(broker) == [Verdict.EXPIRED]


@pytest.mark.parametrize("batch", [None, 2], ids=["single", "in lists"])
async def test_most_once_message_expires_during_its_ack(clock, batch, consumer, broker):
    broker.holds.add(Command.ACK)
    fill_expiring(broker, 0, {0: DAY_S}, count=2)
    handled = handled_by(consumer, most_once=True, batch=batch)
    async with consuming(consumer):
        await until_async(lambda: broker.held)
        clock.ahead_s = 2 * DAY_S
        broker.release()
        await until_async(lambda: handled.messages)
    assert handled.numbers == [1] and not broker.nacks


def waiting(consumer: qmq.Consumer) -> int:
    """Return the number of waiting messages."""
    [subscription] = consumer._connections._subscriptions
    return sum(len(parcel.messages) - parcel.at for parcel in subscription._parcels)


async def test_a_puller_gets_nothing_that_has_expired(metaserver, broker):
    fill_expiring(broker, 60, dict.fromkeys(range(9), 30))
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        assert ns(await puller.pull(10, timeout=10)) == [9]
        await puller.flush()
    assert verdicts(broker)[:9] == [Verdict.EXPIRED] * 9


async def test_dead_letters_do_not_expire(metaserver, broker):
    dead = "%DEAD_RETRY%a%g"
    encode = batch_encoder(dead, now_ms() - 60_000)
    broker.add(dead, encode(Message(dead, {"n": "1"}, id="m1", expires_after=1)))
    async with consumer_of(metaserver).pull(dead, group="support", start="earliest") as puller:
        assert ns(await puller.pull(10, timeout=10)) == [1]


class _Piece:
    class acker:
        is_mailbox = False


def received(data: bytes) -> ReceivedMessage:
    return ReceivedMessage("a", 0, data, _Piece(), 0)


def test_lifetime_starts_at_send_or_due_time():
    message = Message("a", {"x": "y"}, id="m", expires_after=timedelta(minutes=1))
    assert received(encode_message(message, 1_000)).expires_ms == 61_000
    late = received(delayed_encoder("a", 1_000, 500_000)(message))
    assert (late.expires_ms, late.expires_after, late.has_expired(559_999)) == (560_000, 60.0, False)
    assert late.has_expired(560_000) and not received(encode_message(Message("a", id="m"), 0)).has_expired(1 << 60)


@pytest.mark.parametrize("wrong", [0, -1, 0.0001, "1", True, 36_501 * DAY_S, timedelta(0), float("nan")])
def test_a_time_that_cannot_be_is_refused(wrong):
    with pytest.raises(InvalidMessage, match="expires_after"):
        encode_message(Message("a", id="m", expires_after=wrong), 0)


async def test_send_many_sets_expiry(metaserver, broker):
    async with qmq.Producer(metaserver=metaserver.url, app="test", token="secret") as producer:
        await producer.send_many(Message("a", {"n": str(n)}, expires_after=60 if n else None) for n in range(3))
        await producer.send(Message("a", {"n": "3"}, expires_after=61))
    found = [decode_message(bytes(data)) for data in broker.subjects["a"]]
    name = "qmq_consumerExpiresAfter"
    assert [one.properties.get(name) for one in found] == [None, "60000", "60000", "61000"]
