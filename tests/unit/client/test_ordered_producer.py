"""Shell. Messages with an order key over real sockets: their group, and no overtaken retry."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

import qmq
from qmq.client.routes import group_of_key
from qmq.codec import decode_message, label_of
from qmq.errors import BrokerReadOnly, Overloaded, QueueFull
from qmq.message import Message
from qmq.remoting.commands import Command
from qmq.remoting.connection import Connection
from qmq.remoting.packet import Packet
from tests.support.waiting import settle, until_async
from tests.unit.client.test_producer import properties
from tests.unit.client.world import Attempt, LocalBroker, cluster, producer_of


def group_of(key: str, *groups: str) -> str:
    return group_of_key(label_of((), key) >> 32, groups)


def key_for(group: str, *groups: str) -> str:
    return next(key for key in map(str, range(1_000)) if group_of(key, *groups) == group)


def numbers_of_keys(broker: LocalBroker) -> dict[str, list[int]]:
    numbers = defaultdict(list)
    for data in broker.subjects["a"]:
        message = decode_message(data)
        numbers[str(message.order_key)].append(int(str(message["n"])))
    return numbers


def in_order(count: int, keys: int) -> list[Message]:
    return [Message("a", {"n": str(number)}, order_key=f"k{number % keys}") for number in range(count)]


@pytest.mark.parametrize("way", ["send_many", "send_nowait"])
async def test_key_stays_in_one_group_in_order(way):
    async with cluster("g1", "g2", "g3") as (metaserver, brokers), producer_of(metaserver) as producer:
        messages = in_order(3_000, keys=40)
        receipts: list[qmq.Receipt] = []
        if way == "send_many":
            receipts.extend(await producer.send_many(messages))
        else:
            for message in messages:
                producer.send_nowait(message, receipts.append)
            await producer.flush()
        assert len(receipts) == 3_000 and all(receipt.is_stored for receipt in receipts)
        for broker in brokers:
            for key, numbers in numbers_of_keys(broker).items():
                assert group_of(key, "g1", "g2", "g3") == broker.name
                assert numbers == list(range(int(key[1:]), 3_000, 40))
        assert sum(len(broker.subjects["a"]) for broker in brokers) == 3_000


async def test_mixed_receipts_keep_the_order():
    async with cluster("g1", "g2") as (metaserver, brokers), producer_of(metaserver) as producer:
        messages = [
            Message(f"s{number % 3 // 2}", {"n": str(number)}, order_key=f"k{number % 5}" if number % 2 else None)
            for number in range(2_500)
        ]
        messages[7] = Message("s0", {"n": "x" * 40_000}, order_key="k", id="bad")
        receipts = await producer.send_many(messages)
        logs = {broker.name: broker.subjects for broker in brokers}
        for number, receipt in enumerate(receipts):
            if number == 7:
                assert (receipt.outcome, receipt.message_id) == (qmq.Outcome.REFUSED, "bad")
                continue
            stored = decode_message(logs[receipt.broker_group][receipt.subject][receipt.sequence])
            assert (stored["n"], stored.id) == (str(number), receipt.message_id)


async def test_labels_carry_keys_and_tags(broker, producer):
    await producer.send(Message("a", {"n": "1"}, tags={"pay"}, order_key="k"))
    await producer.send_many([Message("a", {"n": "2"}), Message("a", {"n": "3"}, tags={"pay"})])
    await producer.send(Message("a", {"n": "4"}))
    assert [attempt.labels for attempt in broker.attempts] == [
        [label_of({"pay"}, "k")],
        [0, label_of({"pay"}, None)],
        [],
    ]


async def test_one_ordered_batch_is_in_flight(broker, producer):
    await producer.send(Message("a", {"n": "connected"}))
    broker.holds.add(Command.PRODUCE)
    sends = [asyncio.create_task(producer.send(message)) for message in in_order(3, keys=3)]
    await until_async(lambda: broker.held)
    sends += [asyncio.create_task(producer.send(message)) for message in in_order(50, keys=3)]
    sends.append(asyncio.create_task(producer.send(Message("a", {"n": "plain"}))))
    await until_async(lambda: len(broker.held) == 2)
    assert [attempt.count for attempt in broker.attempts[1:]] == [3, 1]
    broker.release()
    await asyncio.gather(*sends)
    assert [attempt.count for attempt in broker.attempts] == [1, 3, 1, 50]


@pytest.mark.parametrize("error", [BrokerReadOnly("operator"), Overloaded("full")])
async def test_ordered_message_waits_for_its_group(error):
    async with cluster("g1", "g2") as (metaserver, [first, second]), producer_of(metaserver) as producer:
        key = key_for("g1", "g1", "g2")
        first.refuse_with = error
        sends = []
        for number in range(20):
            sends.append(asyncio.create_task(producer.send(Message("a", {"n": str(number)}, order_key=key))))
            await asyncio.sleep(0)
        await until_async(lambda: len(first.attempts) >= 2)
        assert (await producer.send(Message("a", {"n": "plain"}))).broker_group == "g2"
        first.refuse_with = None
        receipts = await asyncio.gather(*sends)
        assert {receipt.broker_group for receipt in receipts} == {"g1"}
        assert numbers_of_keys(first)[key] == list(range(20))
        assert properties(second) == ["plain"]


async def test_a_readonly_group_keeps_its_keys():
    async with cluster("g1", "g2") as (metaserver, [first, second]), producer_of(metaserver) as producer:
        key = key_for("g1", "g1", "g2")
        metaserver.set_group(first, writable=False)
        sending = asyncio.create_task(producer.send(Message("a", {"n": "1"}, order_key=key)))
        assert (await producer.send(Message("a", {"n": "2"}, order_key=key_for("g2", "g1", "g2")))).is_stored
        assert not sending.done()
        metaserver.set_group(first, writable=True)
        assert (await sending).broker_group == "g1"


async def test_lost_ordered_batch_is_repeated_first():
    async with cluster("g1", "g2") as (metaserver, [first, second]), producer_of(metaserver) as producer:
        key = key_for("g1", "g1", "g2")
        await producer.send(Message("a", {"n": "0"}, order_key=key))
        losses = iter([False, True, False])

        def lose(connection: Connection, packet: Packet, attempt: Attempt) -> bool:
            is_stored = next(losses, None)
            if is_stored:
                first.lose_answer(Command.PRODUCE)
            elif is_stored is False:
                connection.abort("the test loses a request")
            return is_stored is False

        first.on_produce = lose
        sends = []
        for number in range(1, 200):
            sends.append(asyncio.create_task(producer.send(Message("a", {"n": str(number)}, order_key=key))))
            if number % 20 == 0:
                await settle()
        receipts = await asyncio.gather(*sends)
        assert all(receipt.is_stored for receipt in receipts)
        assert numbers_of_keys(first)[key] == list(range(200))
        assert [receipt.sequence for receipt in receipts] == list(range(1, 200))


async def test_keys_change_groups_while_no_group_takes_anything():
    """Regression: messages waiting for an old lane stopped the producer for good, without an error."""

    async with cluster("g1") as (metaserver, [first]), producer_of(metaserver) as producer:
        await producer.send(Message("a", {"n": "0"}, order_key="k"))
        first.refuse_with = BrokerReadOnly("no slave")
        keys = key_for("g1", "g1", "g2"), key_for("g2", "g1", "g2")
        sends = [asyncio.create_task(producer.send(Message("a", {"n": "1"}, order_key=key))) for key in keys]
        sender = producer._senders.of(is_delayed=False)
        await until_async(
            lambda: len(first.attempts) > 1 and any(queue.group == "g1" for queue in sender._order.active)
        )
        second = LocalBroker("g2")
        second.refuse_with = first.refuse_with
        await second.start()
        metaserver.set_group(second)
        await until_async(lambda: second.connections)
        first.refuse_with = second.refuse_with = None
        assert [receipt.broker_group for receipt in await asyncio.gather(*sends)] == ["g1", "g2"]
        await second.stop()


@pytest.mark.parametrize("way", ["send", "send_many", "send_nowait"])
async def test_calls_of_a_key_enter_a_full_queue_in_order(way, metaserver, broker):
    """A call that is woken and does not run yet is not overtaken."""
    async with producer_of(metaserver, queue_messages_max=2, in_flight_max=1) as producer:
        await producer.send(Message("a", {"n": "0"}, order_key="k"))
        broker.holds.add(Command.PRODUCE)
        sending, refused = list[asyncio.Task[Any]](), list[QueueFull]()

        def send(n: str, way: str = way) -> None:
            message = Message("a", {"n": n}, order_key="k")
            if way == "send_nowait":
                try:
                    producer.send_nowait(message, lambda receipt: None)
                except QueueFull as full:
                    refused.append(full)
            else:
                call = producer.send(message) if way == "send" else producer.send_many([message])
                sending.append(asyncio.create_task(call))

        send("1", "send")
        await until_async(lambda: broker.held)
        for n in "234":
            send(n, "send")  # two wait in the queue, the third for room
        await settle()
        assert producer._backlog.messages == 2
        producer._backlog.waiters.insert(0, lambda: send("5"))  # runs before the call that is woken after it
        broker.release()
        await until_async(lambda: len(sending) + len(refused) == 5 and all(task.done() for task in sending))
        assert numbers_of_keys(broker)["k"] == [*range(5 if refused else 6)]


@pytest.mark.parametrize("end", ["cancelled", "late"])
async def test_call_that_leaves_the_line_lets_the_next_one_enter(end, metaserver, broker):
    async with producer_of(metaserver, queue_messages_max=1, in_flight_max=1, timeout_s=0.3) as producer:
        await producer.send(Message("a", {"n": "0"}, order_key="k"))
        broker.holds.add(Command.PRODUCE)
        first = Message("a", {"n": "1"}, order_key="k")
        sending = [asyncio.create_task(producer.send(first))]
        await until_async(lambda: broker.held)
        for n in "23":
            sending.append(asyncio.create_task(producer.send(Message("a", {"n": n}, order_key="k"))))
        await settle()
        if end == "cancelled":
            sending[2].cancel()
            await asyncio.wait(sending[2:])
        else:
            assert (await sending[2]).outcome is qmq.Outcome.REFUSED
        broker.release()
        assert (await producer.send(Message("a", {"n": "4"}, order_key="k"))).is_stored
        await asyncio.wait(sending)
        assert producer._backlog.entering == {}
        assert numbers_of_keys(broker)["k"][-1] == 4
