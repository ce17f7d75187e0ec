"""Shell. Pullers, and brokers that cut connections, change masters and refuse acks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest.mock import patch

import pytest

import qmq
from qmq.client import group_session, membership
from qmq.errors import InvalidAck, NotMaster, NotServed, SubscriptionReplaced
from qmq.remoting.commands import Command
from tests.support.waiting import settle, until_async
from tests.unit.client.world import (
    LocalBroker,
    cancelled,
    cluster,
    consumer_of,
    fill,
    ns,
    pull_all,
    pulling,
    subscribes,
)


def counted_sweeps():
    """Calls that send done messages inside pieces."""
    sweep = group_session.GroupSession._sweep
    return patch.object(group_session.GroupSession, "_sweep", autospec=True, side_effect=sweep)


async def test_puller_gets_messages_of_all_groups_once():
    async with cluster("g1", "g2") as (metaserver, [first, second]):
        fill(first, range(1000))
        fill(second, range(1000, 1500))
        metaserver.set_group(second, writable=False)
        async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
            messages = await pull_all(puller, 1500)
            assert sorted(ns(messages)) == list(range(1500))
            of_first = [message for message in messages if message.broker_group == "g1"]
            assert ns(of_first) == list(range(1000)), "of one group, in order"
            assert [message.sequence for message in of_first] == list(range(1000))
            assert await puller.pull(1, timeout=0.05) == []


async def test_slow_message_delays_only_its_piece():
    async with pulling(12, prefetch_messages=16) as (broker, puller):
        messages = await pull_all(puller, 12)  # in pieces of four
        await puller.ack(messages[4:7])
        await messages[0].ack()
        await puller.ack(messages[8:])
        await until_async(lambda: len(broker.unacked()) == 7)
        assert broker.unacked() == [1, 2, 3, 4, 5, 6, 7]
        base = messages[0].pull_sequence
        assert broker.acks == [[(base, base + 1), (base + 8, base + 12)]]
        await until_async(lambda: len(broker.unacked()) == 4)
        assert broker.unacked() == [1, 2, 3, 7], "the done messages of its piece follow"


async def test_consecutive_pieces_share_an_ack(consumer, broker):
    """Each message selected by a tag is a batch of its own in the log; it must not cost as much as a batch."""
    for n in range(100):
        fill(broker, [n], tags={"t"} if n % 10 in (3, 4, 7) else ())
    broker.earlier = {53: 1}  # it cannot be held with the others
    async with consumer.pull("a", group="g", start="earliest", tags=["t"]) as puller:
        messages = await pull_all(puller, 30)
        expected = [n for n in range(100) if n % 10 in (3, 4, 7)]
        assert ns(messages) == [message.sequence for message in messages] == expected
        base = messages[0].pull_sequence
        assert [message.pull_sequence - base for message in messages] == list(range(30))
        assert [message.sequence for message in messages if message.times > 1] == [53]
        await puller.ack([message for message in messages if message.sequence not in (47, 53)])
        await until_async(lambda: broker.acks)
        assert broker.acks == [[(base, base + 14), (base + 16, base + 30)]]
        broker.cut()
        await until_async(lambda: len(subscribes(broker)) == 2)
        await puller.ack(messages)
        await puller.flush()
        assert not broker.unacked()


async def test_full_consumer_with_slow_message_pulls_again(monkeypatch, metaserver, broker):
    monkeypatch.setattr(group_session, "SWEEP_S", 3600)

    fill(broker, range(200), apart=True)  # each message is a piece of its own
    async with consumer_of(metaserver).pull("a", group="g", start="earliest", unacked_max=40) as puller:
        messages = await pull_all(puller, 40)
        await puller.ack(messages[1:])
        assert ns(await pull_all(puller, 39)) == list(range(40, 79))


async def test_partial_piece_is_acked_after_the_ack_delay(monkeypatch):
    monkeypatch.setattr(group_session, "SWEEP_S", 0.01)

    async with pulling(40) as (broker, puller):
        messages = await pull_all(puller, 40)
        broker.holds.add(Command.ACK)
        for number in range(group_session.REQUESTS_IN_FLIGHT):
            await messages[number].ack()
            await until_async(lambda done=number: len(broker.held) == done + 1)
        with counted_sweeps() as sweeps:
            await puller.ack(messages[group_session.REQUESTS_IN_FLIGHT + 1 :])
            await until_async(lambda: sweeps.call_count)  # the ack is due, and no request may be sent
        broker.release()
        await until_async(lambda: broker.unacked() == [group_session.REQUESTS_IN_FLIGHT])


async def test_flush_stores_acks_inside_pieces():
    async with pulling(10) as (broker, puller):
        messages = await pull_all(puller, 10)
        await puller.ack([messages[1], *messages[5:]])
        await puller.flush()
        assert broker.unacked() == [0, 2, 3, 4]


async def test_flush_raises_after_the_subscription_failed(metaserver, broker):
    fill(broker, range(3))
    first, second = (consumer_of(metaserver, consumer_id="same", drain_s=0.1) for _ in range(2))
    async with first.pull("a", group="g", start="earliest") as puller:
        messages = await pull_all(puller, 3)
        async with second.pull("a", group="g"):
            with pytest.raises(SubscriptionReplaced, match="consumer_id 'same'.*give each consumer its own"):
                await puller.pull(1, timeout=10)
            await puller.ack(messages)
            with pytest.raises(SubscriptionReplaced):
                await puller.flush()
            await until_async(puller._task.done)
            with pytest.raises(SubscriptionReplaced):
                await puller.flush()


async def test_flush_waits_while_going_offline(consumer, broker):
    fill(broker, range(3))
    async with consumer.pull("a", group="g", start="earliest") as puller:
        messages = await pull_all(puller, 3)
        broker.holds.add(Command.ACK)
        await puller.ack(messages)
        consumer.offline()
        await until_async(lambda: broker.held)
        await settle()
        flushed = asyncio.create_task(puller.flush())
        await settle()
        assert not flushed.done()
        broker.release()
        await flushed
        assert all(message.is_settled for message in messages)


async def test_restart_with_same_id_gets_unacked_messages(metaserver, broker):
    fill(broker, range(10))
    first = consumer_of(metaserver, consumer_id="c1", drain_s=0.1)
    puller = await first.pull("a", group="g", start="earliest").__aenter__()
    await puller.ack((await pull_all(puller, 10))[:3])
    await puller.flush()
    assert first._connections is not None
    await first._connections.close()  # as in a crash: no unsubscribe
    second = consumer_of(metaserver, consumer_id="c1")
    async with second.pull("a", group="g") as again:
        assert subscribes(broker)[0]["held_end"] == 0
        assert ns(await pull_all(again, 7)) == list(range(3, 10))


async def test_consumer_follows_the_new_master(metaserver, broker, consumer):
    events = []

    @consumer.on_master_changed
    def broken(event: qmq.MasterChanged) -> None:
        raise ValueError("it affects no other callback")

    consumer.on_master_changed(events.append)
    fill(broker, range(50))
    async with consumer.pull("a", group="g", start="earliest") as puller:
        messages = await pull_all(puller, 50)
        await puller.ack(messages[:10])
        await puller.flush()
        assert events == []
        new = LocalBroker("g1", slave_of=broker)
        await new.start()
        broker.move_to(new)
        broker.cut()
        metaserver.set_group(new, term=2)
        await new.copies.ready()
        fill(new, range(50, 60))
        more = await pull_all(puller, 10)
        assert ns(more) == list(range(50, 60))
        assert more[0].pull_sequence >= 2 << 32, "the new mastership began after a gap"
        other = LocalBroker("other")
        await other.start()
        metaserver.set_group(other)
        await until_async(lambda: other.subscribes)  # by a route that still has the same master
        await puller.ack([*messages[10:], *more])
        await puller.flush()
        assert not new.unacked() and events == [qmq.MasterChanged("g1", 2)]
    await new.stop()
    await other.stop()


async def test_not_master_is_retried(metaserver, broker):
    fill(broker, range(5))
    broker.refuse_with = NotMaster("not yet")
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        await until_async(lambda: len(metaserver.requests) >= 2)  # it requested routes again
        broker.refuse_with = None
        assert ns(await pull_all(puller, 5)) == list(range(5))


async def test_waiting_messages_survive_a_refused_ack():
    async with pulling(20) as (broker, puller):
        taken = await pull_all(puller, 5)
        assert len(broker.unacked()) == 20, "15 wait here"
        broker.ack_error = InvalidAck("not yours")
        await puller.ack(taken[:1])
        await until_async(lambda: len(subscribes(broker)) == 2)
        assert ns(await pull_all(puller, 20)) == list(range(20))
        assert await puller.pull(1, timeout=0.05) == []


async def test_prefetch_and_unacked_max_are_limits():
    async with pulling(1000, prefetch_messages=40, unacked_max=100) as (broker, puller):
        await until_async(lambda: len(broker.pulls) >= 4)
        await settle()
        assert len(broker.unacked()) <= 40
        assert {pull.messages_max for pull in broker.pulls} == {10}
        messages = []
        while len(messages) < 100:
            messages += await puller.pull(1000, timeout=10)
        assert await puller.pull(1000, timeout=0.1) == [] and len(messages) == 100
        await puller.ack(messages)
        assert len(await puller.pull(10, timeout=10)) == 10, "acks make room"


@pytest.mark.parametrize("prefetch", [1, 3, 5, 10])
async def test_small_prefetch_is_not_exceeded(prefetch):
    async with pulling(50, prefetch_messages=prefetch) as (broker, puller):
        for taken in range(1, 21):
            await puller.pull(1, timeout=10)
            await settle()
            assert broker.positions["a", "g"] - taken <= prefetch


def test_consumers_send_three_heartbeats_per_lease():
    assert membership._beat_s(9_000) == 3.0


async def test_heartbeats_follow_each_groups_lease():
    async with cluster("long") as (metaserver, [long]):
        long.lease_ms = 3_600_000
        async with consumer_of(metaserver).pull("a", group="g"):
            await until_async(lambda: long.heartbeats)
            short = LocalBroker("short")
            short.lease_ms = 60
            await short.start()
            metaserver.set_group(short)
            await until_async(lambda: short.heartbeats >= 5)
            assert long.heartbeats == 1
        await short.stop()


async def test_a_puller_nacks_and_gives_up_messages():
    async with pulling(6, retry_delay=1_000) as (broker, puller):
        messages = await pull_all(puller, 6)
        await puller.nack(messages[:2], "soon", delay=0.01)
        await puller.nack([messages[2]], "in the end")
        await puller.dead_letter(messages[3:5], "never")
        with pytest.raises(qmq.InvalidRequest):
            await puller.nack([messages[5]], delay=-1)
        await puller.flush()
        assert set(broker.unacked()) - {0, 1} == {5}, "the first two may be delivered again"
        again = await pull_all(puller, 2)
        assert [(message["n"], message.times) for message in again] == [("0", 2), ("1", 2)]
        assert broker.dead["a", "g"] == [(3, "never"), (4, "never")]
        delays = [[entry.delay_ms for entry in nack.entries] for nack in broker.nacks]
        assert delays[0][0] <= 10 and 990_000 < delays[1][0] <= 1_000_000


async def test_a_pull_that_is_cancelled_loses_nothing():
    async with pulling(0) as (broker, puller):
        got: list[str] = []
        for n in range(200):
            task = asyncio.create_task(puller.pull(10, timeout=10))
            for _ in range(n % 7):
                await asyncio.sleep(0)
            fill(broker, [n])
            for _ in range(n % 11):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                got += [str(message["n"]) for message in await task]
        while len(got) < 200:
            got += [str(message["n"]) for message in await puller.pull(1_000, timeout=10)]
        assert sorted(got, key=int) == [str(n) for n in range(200)]


async def test_several_tasks_may_pull_from_one_puller():
    async with pulling(0) as (broker, puller):
        tasks = [asyncio.create_task(puller.pull(1, timeout=10)) for _ in range(5)]
        await until_async(lambda: broker.pulls)
        tasks[0].cancel()
        fill(broker, range(4))
        got = [message["n"] for messages in await asyncio.gather(*tasks[1:]) for message in messages]
        assert sorted(got) == ["0", "1", "2", "3"]


async def test_cancelled_woken_task_wakes_another():
    async with pulling(0) as (broker, puller):
        await until_async(lambda: broker.pulls)
        subscription = puller._subscription
        assert subscription is not None
        first, second = (asyncio.create_task(subscription.wait()) for _ in range(2))
        await asyncio.sleep(0)
        subscription._wake(1)
        first.cancel()
        async with asyncio.timeout(60):
            await second


async def test_timed_out_pulls_leave_no_waiters():
    """Regression: a puller that polled an idle subject grew with each call."""

    async with pulling(1) as (broker, puller):
        messages = await pull_all(puller, 1)
        subscription = puller._subscription
        assert subscription is not None
        for _ in range(3):
            assert await puller.pull(1, timeout=0) == []
        assert not subscription._takers
        broker.holds.add(Command.ACK)
        await puller.ack(messages)
        for _ in range(3):
            flushing = asyncio.create_task(puller.flush())
            await asyncio.sleep(0)
            await cancelled(flushing)
        assert not subscription._settlers
        broker.release()
        await puller.flush()


async def test_pull_without_timeout_returns_prefetched():
    async with pulling(0) as (broker, puller):
        assert await puller.pull(10, timeout=0) == []
        assert await puller.pull(0, timeout=10) == []
        fill(broker, range(3))
        messages: list[qmq.ReceivedMessage] = []
        while len(messages) < 3:
            messages += await puller.pull(10, timeout=0)
        assert ns(messages) == [0, 1, 2]


async def test_most_once_acks_only_pulled_messages():
    async with pulling(10, most_once=True) as (broker, puller):
        messages = await puller.pull(4, timeout=10)
        assert all(message.is_settled for message in messages)
        assert broker.unacked() == list(range(4, 10))
    assert sorted(broker.returned["a", "g"]) == list(range(4, 10))


async def test_most_once_cancelled_pull_is_returned_next():
    """Such acks cannot be taken back: the messages would be lost without a crash."""

    async with pulling(8, most_once=True) as (broker, puller):
        broker.holds.add(Command.ACK)
        pulled = asyncio.create_task(puller.pull(4, timeout=10))
        await until_async(lambda: broker.held)
        pulled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulled
        broker.release()
        assert ns(await puller.pull(3, timeout=10)) == [0, 1, 2], "as many as asked for"
        assert ns(await pull_all(puller, 5)) == [3, 4, 5, 6, 7]


async def test_most_once_pull_ends_with_the_puller(metaserver, broker):
    fill(broker, range(10))
    consumer = consumer_of(metaserver, consumer_id="c1", drain_s=0.1)
    async with consumer.pull("a", group="g", start="earliest", most_once=True) as puller:
        await puller.pull(1, timeout=10)
        broker.ack_error = NotServed("the roles are being swapped")
        pulled = asyncio.create_task(puller.pull(4, timeout=0.1))
        await until_async(lambda: broker.ack_error is None)
        await broker.stop()
        puller.stop()
        async with asyncio.timeout(60):
            assert await pulled == []


async def test_offline_puller_holds_nothing(consumer, broker):
    fill(broker, range(10))
    async with consumer.pull("a", group="g", start="earliest") as puller:
        messages = await puller.pull(3, timeout=10)
        consumer.offline()
        assert await puller.pull(1, timeout=0.05) == []
        assert broker.unsubscribes == 0, "it waits for what was taken"
        await puller.ack(messages)
        await until_async(lambda: broker.unsubscribes == 2)
        assert sorted(broker.returned["a", "g"]) == list(range(3, 10))
        waiting = asyncio.create_task(puller.pull(100, timeout=10))
        consumer.online()
        assert ns(await waiting)[0] == 3


async def test_urgent_subject_is_pulled_first(consumer, broker):
    fill(broker, range(500), "normal")
    handled = []
    terms = {"group": "pay", "start": "earliest", "prefetch_messages": 100}
    async with consumer.pull("urgent", **terms) as urgent, consumer.pull("normal", **terms) as normal:
        while len(handled) < 505:
            for puller in (urgent, normal):
                if messages := await puller.pull(10, timeout=0.05 if puller is normal else 0):
                    handled += [message.subject for message in messages]
                    await puller.ack(messages)
                    break
            if len(handled) == 100:
                fill(broker, range(5), "urgent")
                await until_async(lambda: urgent._subscription.next_message() is not None)
    assert handled.index("urgent") <= 110 and handled.count("urgent") == 5


async def test_leaving_offline_does_not_wait(metaserver, broker):
    fill(broker, range(3))
    consumer = consumer_of(metaserver, consumer_id="c1", drain_s=1_000.0)
    async with consumer.pull("a", group="g", start="earliest") as puller:
        await puller.pull(3, timeout=10)
        consumer.offline()
        assert await puller.pull(1, timeout=0.05) == []
    assert broker.times["a", "g"] == {0: 1, 1: 1, 2: 1}


async def test_puller_opens_once(consumer):
    puller = consumer.pull("a", group="g")
    with pytest.raises(qmq.ClientClosed):
        await puller.pull(1, timeout=1)
    async with puller:
        with pytest.raises(qmq.InvalidRequest, match="already"):
            consumer.listen("a", group="g")
    for use in (puller.__aenter__(), puller.pull(1, timeout=1)):
        with pytest.raises(qmq.ClientClosed):
            await use
    async with consumer.pull("a", group="g"):
        pass
