"""Shell. Numbered batches against brokers that lose answers, refuse, change and fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from zlib import crc32

import pytest

from qmq.client import route_watch
from qmq.client.batch import Answer, NotStored, NumberedBatch, Stored, Unknown
from qmq.client.numbered_sender import NumberedSender
from qmq.client.routes import group_of_key
from qmq.codec import batch_encoder, decode_message, encode_labels, join_batch, label_of
from qmq.errors import (
    BrokerReadOnly,
    ClientClosed,
    InvalidMessage,
    MessageTooLarge,
    NotServed,
    OutcomeUnknown,
    Overloaded,
)
from qmq.log.frame import label_flags
from qmq.message import Message
from qmq.remoting.commands import Command
from tests.support.waiting import until_async
from tests.unit.client.world import TOKEN, LocalMetaserver, cluster


def batch(number: int, *texts: str, producer: int = 7, subject: str = "a", key: str | None = None) -> NumberedBatch:
    encode = batch_encoder(subject, 0)
    body = join_batch([encode(Message(subject, {"n": text}, id=f"id-{text[:9]}")) for text in texts])
    flags = 0
    if key is not None:
        labels = [label_of((), key)] * len(texts)
        body, flags = body + encode_labels(labels), label_flags(labels)
    return NumberedBatch(producer, number, subject, len(texts), crc32(body), flags, [body])


@asynccontextmanager
async def sender_of(metaserver: LocalMetaserver, *groups: str, **options: float) -> AsyncIterator[NumberedSender]:
    async with NumberedSender(metaserver=metaserver.url, token=TOKEN, app="test", **options) as sender:
        sender.watch("a")
        await until_async(lambda: sorted(sender.groups("a")) == sorted(groups))
        yield sender


@pytest.fixture
async def sender(metaserver: LocalMetaserver) -> AsyncIterator[NumberedSender]:
    async with sender_of(metaserver, "g1") as sender:
        yield sender


async def sent(sender: NumberedSender, group: str, numbered: NumberedBatch) -> Answer:
    answers: list[Answer] = []
    sender.send(group, numbered, answers.append)
    await until_async(lambda: answers)
    await asyncio.sleep(0)
    assert len(answers) == 1
    return answers[0]


async def test_batch_is_stored_under_its_number():
    async with cluster("g1", "g2") as (metaserver, brokers), sender_of(metaserver, "g1", "g2") as sender:
        assert await sent(sender, "g2", batch(41, "x", "y", key="k")) == Stored(0, 2, [])
        [attempt] = brokers[1].attempts
        assert (attempt.producer, attempt.batch, attempt.labels) == (7, 41, [label_of((), "k")] * 2)
        assert [decode_message(subject)["n"] for subject in brokers[1].subjects["a"]] == ["x", "y"]
        assert brokers[0].attempts == []


async def test_repeat_after_lost_connection_stores_once(broker, sender):
    broker.lose_answer(Command.PRODUCE)
    answers: list[Answer] = []
    sender.send("g1", batch(1, "x"), answers.append)
    await until_async(lambda: answers)
    assert isinstance(answers[0], Unknown)
    await until_async(lambda: sender.groups("a"))
    assert await sent(sender, "g1", batch(1, "x")) == Stored(0, 1, [])
    assert len(broker.subjects["a"]) == 1


@pytest.mark.parametrize("error", [BrokerReadOnly("no slave"), Overloaded("full"), InvalidMessage("bad")])
async def test_refusal_is_not_repeated(error, broker, sender):
    broker.refuse_with = error
    answer = await sent(sender, "g1", batch(1, "x"))
    assert isinstance(answer, NotStored) and type(answer.error) is type(error)
    assert len(broker.attempts) == 1


async def test_unknown_answer_stays_unknown(broker, sender):
    broker.refuse_with = OutcomeUnknown("stored on one copy")
    assert isinstance(await sent(sender, "g1", batch(1, "x")), Unknown)


async def test_refused_messages_have_positions(broker, sender):
    broker.limit(message_bytes_max=200)
    answer = await sent(sender, "g1", batch(1, "x", "y" * 300, "z"))
    assert isinstance(answer, Stored) and answer.stored == 2
    assert [position for position, _ in answer.refused] == [1]


async def test_a_group_without_a_connection_stores_nothing(broker, sender):
    await broker.stop()
    await until_async(lambda: not sender.groups("a"))
    for group in ("g1", "never heard of"):
        answer = await sent(sender, group, batch(1, "x"))
        assert isinstance(answer, NotStored) and isinstance(answer.error, NotServed)
    assert "g1" in sender.why_not("a")


async def test_oversized_batch_is_refused(metaserver, broker):
    broker.limit(packet_bytes_max=4096)
    async with sender_of(metaserver, "g1") as sender:
        assert sender.room("g1") < 4096
        answer = await sent(sender, "g1", batch(1, "x" * 5000))
        assert isinstance(answer, NotStored) and isinstance(answer.error, MessageTooLarge)
        assert broker.attempts == []


async def test_the_window_of_the_broker_is_kept(metaserver, broker):
    broker.limit(window_bytes=1000)
    async with sender_of(metaserver, "g1") as sender:
        broker.holds.add(Command.PRODUCE)
        answers = []
        sender.send("g1", batch(1, "x" * 600), answers.append)
        assert 0 < sender.room("g1") < 400 and sender.in_flight("g1") == 1
        answer = await sent(sender, "g1", batch(2, "y" * 600))
        assert isinstance(answer, NotStored) and isinstance(answer.error, Overloaded)
        await until_async(lambda: broker.held)
        broker.release()
        await until_async(lambda: answers)
        assert sender.room("g1") == 1000 and sender.in_flight("g1") == 0


async def test_late_answers_drop_the_connection():
    async with cluster("g1") as (metaserver, [broker]), sender_of(metaserver, "g1", answer_timeout_s=2.0) as sender:
        broker.holds.add(Command.PRODUCE)
        answer = await sent(sender, "g1", batch(1, "x"))
        assert isinstance(answer, Unknown) and "no answer" in answer.reason
        assert len(broker.held) == 1


async def test_closing_makes_outcomes_unknown():
    answers: list[Answer] = []
    async with cluster("g1") as (metaserver, [broker]):
        async with sender_of(metaserver, "g1") as sender:
            broker.holds.add(Command.PRODUCE)
            sender.send("g1", batch(1, "x"), answers.append)
            await until_async(lambda: broker.held)
        assert [type(answer) for answer in answers] == [Unknown]
        closed = await sent(sender, "g1", batch(2, "x"))
        assert isinstance(closed, NotStored) and isinstance(closed.error, ClientClosed)
    assert len(answers) == 1


async def test_readonly_group_is_excluded():
    async with cluster("g1", "g2") as (metaserver, brokers), sender_of(metaserver, "g1", "g2") as sender:
        changes: list[list[str]] = []
        sender.on_change(lambda: changes.append(sender.groups("a")))
        metaserver.set_group(brokers[0], writable=False)
        await until_async(lambda: sender.groups("a") == ["g2"])
        metaserver.set_group(brokers[0], writable=True)
        await until_async(lambda: len(sender.groups("a")) == 2)
        assert ["g2"] in changes and sorted(changes[-1]) == ["g1", "g2"]


async def test_refusing_group_rests_and_returns(metaserver, broker, sender):
    changed = asyncio.Event()
    broker.refuse_with = BrokerReadOnly("no slave")
    await sent(sender, "g1", batch(1, "x"))
    assert sender.groups("a") == []
    sender.on_change(lambda: changed.set() if sender.groups("a") else None)
    async with asyncio.timeout(20):  # the metaserver would send it again after 50
        await changed.wait()


async def test_home_matches_producers():
    async with cluster("g1", "g2") as (metaserver, brokers), sender_of(metaserver, "g1", "g2") as sender:
        label = label_of((), "seat-1")
        home = group_of_key(label >> 32, ["g1", "g2"])
        assert sender.home("a", label) == home
        metaserver.set_group(brokers[int(home[1]) - 1], writable=False)
        await until_async(lambda: len(sender.groups("a")) == 1)
        assert sender.home("a", label) == home
        assert sender.home("unwatched", label) is None


async def test_forgotten_route_returns(monkeypatch, metaserver):
    monkeypatch.setattr(route_watch, "KEPT", 0)
    monkeypatch.setattr(route_watch, "IDLE_S", 0.05)
    async with sender_of(metaserver, "g1") as sender:
        await until_async(lambda: not sender.is_known("a"))
        await until_async(lambda: sender.groups("a") == ["g1"])
        assert isinstance(await sent(sender, "g1", batch(1, "x")), Stored)


async def test_refused_subject_has_its_reason(metaserver, sender):
    assert sender.refusals == {} and not sender.is_known("b")
    metaserver.refuse["b"] = "one subject too many"
    sender.watch("b")
    await until_async(lambda: sender.refusals == {"b": "one subject too many"})
    assert sender.is_known("b") and sender.groups("b") == [] and "one subject too many" in sender.why_not("b")
    assert sender.groups("a") == ["g1"]
