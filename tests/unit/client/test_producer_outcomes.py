"""Shell. Every message gets its outcome: without a route, in full queues, at the end of the producer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

import qmq
from qmq.client.routes import FAILURES_MAX, REST_MS_MAX, BreakerState
from qmq.errors import (
    BrokerReadOnly,
    ClientClosed,
    MessageTooLarge,
    NoRoute,
    NotServed,
    Overloaded,
    QueueFull,
    SubjectFull,
)
from qmq.message import Message
from qmq.remoting.commands import Command
from tests.support.waiting import settle, until_async
from tests.unit.client.test_producer import numbered, properties
from tests.unit.client.world import LocalBroker, cluster, producer_of


async def test_subject_without_route_is_refused():
    """Gaps of QMQ, sections 1, 2 and 10: such a send never completes."""

    async with cluster("g1") as (metaserver, _), producer_of(metaserver, timeout_s=1.5) as producer:
        metaserver.refuse["nowhere"] = "no broker group is allowed for it"
        receipt = await producer.send(Message("nowhere", {"n": "1"}, id="mine"))
        assert (receipt.outcome, receipt.message_id) == (qmq.Outcome.REFUSED, "mine")
        assert "no broker group is allowed" in receipt.reason
        with pytest.raises(NoRoute):
            receipt.check()
        [many] = await producer.send_many([Message("nowhere")])
        [ordered] = await producer.send_many([Message("nowhere", order_key="k")])
        assert isinstance(many.error, NoRoute) and isinstance(ordered.error, NoRoute)


async def test_missing_routes_delay_no_other_subject(metaserver, broker):
    """Gap of QMQ, section 2: three such subjects stop the producer."""
    async with producer_of(metaserver, queue_messages_max=500) as producer:
        stuck: list[qmq.Receipt] = []
        for number in range(3):
            metaserver.refuse[f"stuck{number}"] = "no broker group"
            with pytest.raises(QueueFull):
                for _ in range(501):
                    producer.send_nowait(Message(f"stuck{number}"), stuck.append)
        for _ in range(5):
            receipts = await asyncio.gather(*(producer.send(message) for message in numbered(100)))
            assert all(receipt.is_stored for receipt in receipts)
        assert (await producer.send_many(numbered(3_000))).all_stored
        assert not stuck
        metaserver.refuse.clear()
        metaserver.notify()
        await producer.flush()
        assert stuck and all(receipt.is_stored for receipt in stuck)


async def test_stuck_send_many_ends_early():
    """A call with many batches for an unserved subject ends about when its first batch does."""

    async with cluster("g1") as (metaserver, _), producer_of(metaserver, timeout_s=0.5) as producer:
        metaserver.refuse["nowhere"] = "no broker group"
        began = asyncio.get_running_loop().time()
        receipts = await producer.send_many(numbered(30_000, "nowhere"))
        assert receipts.count_of(qmq.Outcome.REFUSED) == 30_000
        assert asyncio.get_running_loop().time() - began < 0.5 * 15, "30 batches, of which 2 wait at a time"


async def test_readonly_deadline_is_not_served():
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, timeout_s=2.0) as producer:
        broker.refuse_with = BrokerReadOnly("disk")
        receipt = await producer.send(Message("a"))
        assert receipt.outcome is qmq.Outcome.REFUSED and "disk" in receipt.reason
        assert isinstance(receipt.error, NotServed) and not isinstance(receipt.error, NoRoute)


@pytest.mark.parametrize("is_in_route", [False, True], ids=["by the broker", "by the route"])
async def test_readonly_wait_zero_refuses_at_once(is_in_route):
    options = {"timeout_s": 3_600.0, "readonly_wait_s": 0.0}
    async with cluster("g1", "g2") as (metaserver, brokers), producer_of(metaserver, **options) as producer:
        assert (await producer.send(Message("a"))).is_stored
        for broker in brokers:
            broker.refuse_with = BrokerReadOnly(f"{broker.name} is readonly: disk, make room")
            if is_in_route:
                metaserver.set_group(broker, writable=False)
        receipt = await producer.send(Message("a"))
        assert isinstance(receipt.error, NotServed) and receipt.outcome is qmq.Outcome.REFUSED
        assert all(f"{broker.name}: " in receipt.reason for broker in brokers)
        ordered = await producer.send(Message("a", order_key="k"))
        assert isinstance(ordered.error, NotServed), "also where one group alone may take it"
        for broker in brokers:
            broker.refuse_with = None
            metaserver.set_group(broker, writable=True)
        while not (await producer.send(Message("a"))).is_stored:
            pass


async def test_full_queue_refuses_at_the_deadline(metaserver, broker):
    """Rule: queue full. QMQ blocks for 50 ms and then drops the message."""
    async with producer_of(metaserver, queue_messages_max=5, in_flight_max=1) as producer:
        await producer.send(Message("a", {"n": "connected"}))
        broker.holds.add(Command.PRODUCE)
        done: list[qmq.Receipt] = []
        producer.send_nowait(Message("a", {"n": "under way"}), done.append)
        await until_async(lambda: broker.held)
        for message in numbered(5):
            producer.send_nowait(message, done.append)
        with pytest.raises(QueueFull):
            producer.send_nowait(Message("a", {"n": "5"}), done.append)
        patient_ms, producer._timeout_ms = producer._timeout_ms, 200  # less than the earlier ones have
        receipt = await producer.send(Message("a", {"n": "waits"}))
        assert receipt.outcome is qmq.Outcome.REFUSED and not done
        producer._timeout_ms = patient_ms
        waiting = asyncio.create_task(producer.send(Message("a", {"n": "room"})))
        await asyncio.sleep(0)
        broker.release()
        await producer.flush()
        assert (await waiting).is_stored and len(done) == 6
        assert properties(broker) == ["connected", "under way", *"01234", "room"]


async def test_producers_of_one_process_share_nothing():
    """Gaps of QMQ, sections 2 and 10: one object of settings and one metaserver for the whole process."""

    async with cluster("g1") as (here, [near]), cluster("g2") as (there, [far]):
        async with producer_of(here, queue_messages_max=1) as first, producer_of(there) as second:
            receipts = await asyncio.gather(first.send(Message("a", {"n": "1"})), second.send(Message("a", {"n": "2"})))
            assert [receipt.broker_group for receipt in receipts] == ["g1", "g2"]
            with pytest.raises(QueueFull):
                for message in numbered(2):
                    first.send_nowait(message, lambda _: None)
            for message in numbered(2):
                second.send_nowait(message, lambda _: None)
        assert (len(properties(near)), len(properties(far))) == (2, 3)


async def test_flush_waits_for_earlier_messages_only():
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, in_flight_max=4) as producer:
        await producer.flush()
        await producer.send(Message("a", {"n": "0"}))
        broker.holds.add(Command.PRODUCE)
        receipts = []
        for message in (*numbered(10), Message("a", {"n": "10"}, order_key="k")):
            producer.send_nowait(message, receipts.append)
        many = asyncio.create_task(producer.send_many(numbered(10, "b")))
        await until_async(lambda: len(broker.held) >= 3)
        flushing = asyncio.create_task(producer.flush())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not flushing.done()
        broker.release()
        broker.holds.add(Command.PRODUCE)
        producer.send_nowait(Message("a", {"n": "later"}), receipts.append)
        await flushing
        assert len(receipts) == 11 and (await many).all_stored
        await until_async(lambda: broker.held)
        broker.release()
        await producer.flush()
        assert len(receipts) == 12


@pytest.mark.parametrize("cancels", [1, 2], ids=["cancelled", "cancelled while it disconnects, too"])
async def test_cancelled_close_resolves_all_messages(cancels, metaserver, broker):
    """Gap of QMQ, section 2: messages left at shutdown are neither sent nor reported."""
    producer = await producer_of(metaserver, in_flight_max=1).__aenter__()
    await producer.send(Message("a", {"n": "0"}))
    broker.holds.add(Command.PRODUCE)
    receipts = []
    sends = [asyncio.create_task(producer.send(Message("a", {"n": "under way"})))]
    await until_async(lambda: broker.held)
    sends += [asyncio.create_task(producer.send(Message("a", {"n": "waits"}))) for _ in range(2)]
    sends.append(asyncio.create_task(producer.send(Message("a", {"n": "in order"}, order_key="k"))))
    many = asyncio.create_task(producer.send_many(numbered(10)))
    producer.send_nowait(Message("a"), receipts.append)
    await settle()
    closing = asyncio.create_task(producer.close())
    for _ in range(cancels):
        await asyncio.sleep(0)
        closing.cancel()
    outcomes = [receipt.outcome for receipt in await asyncio.gather(*sends)]
    assert outcomes == [qmq.Outcome.UNKNOWN] + [qmq.Outcome.REFUSED] * 3
    assert (await many).count_of(qmq.Outcome.REFUSED) == 10
    assert [type(receipt.error) for receipt in receipts] == [ClientClosed]


async def test_send_many_ends_with_its_producer(metaserver, broker):
    async with producer_of(metaserver) as producer:
        opened = asyncio.Event()

        def messages() -> Iterator[Message]:
            for number in range(20_000):
                if number == 5_000:
                    opened.set()
                yield Message("a", {"n": str(number)}, order_key="k" if number % 5_000 == 1 else None)

        many = asyncio.create_task(producer.send_many(messages()))
        await opened.wait()
    receipts = await many
    stored = receipts.count_of(qmq.Outcome.STORED)
    assert len(receipts) == 20_000 and stored == len(broker.subjects["a"])
    assert {type(receipt.error) for receipt in receipts if not receipt.is_stored} <= {ClientClosed}


async def test_overload_does_not_open_the_breaker(broker, producer):
    """Rule: any answer counts as a success for the breaker."""
    broker.refuse_with = Overloaded("full")
    sending = asyncio.create_task(producer.send(Message("a")))
    await until_async(lambda: len(broker.attempts) >= 3)
    assert producer._senders.of(is_delayed=False)._groups["g1"].breaker._failures == 0
    broker.refuse_with = None
    assert (await sending).is_stored


async def test_silent_group_is_given_up():
    """Rule: 100 requests in a row without an answer open the breaker; then no request goes there."""

    async with cluster("g1") as (metaserver, [silent]):
        async with producer_of(metaserver, timeout_s=6.0, answer_timeout_s=0.1, in_flight_max=64) as producer:
            await producer.send(Message("a", {"n": "connected"}))
            breaker = producer._senders.of(is_delayed=False)._groups["g1"].breaker
            silent.holds.add(Command.PRODUCE)
            sends = []
            for message in numbered(60):
                sends.append(asyncio.create_task(producer.send(message)))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            await until_async(lambda: breaker.state is BreakerState.OPEN)
            count = len(silent.attempts)
            assert count > FAILURES_MAX
            other = LocalBroker("g2")
            await other.start()
            metaserver.set_group(other)
            receipts = [await producer.send(message) for message in numbered(20)]
            assert {receipt.broker_group for receipt in receipts} == {"g2"}
            assert len(silent.attempts) == count, "not even repeats"
            unknown = await asyncio.gather(*sends)
            assert {(receipt.outcome, receipt.broker_group) for receipt in unknown} == {(qmq.Outcome.UNKNOWN, "g1")}
            assert unknown[0].reason == "no answer of g1 before the deadline; last: no answer for 0.1 s"
            await other.stop()


async def test_a_new_master_gets_a_new_breaker(metaserver, broker, producer):
    """Rule: kept while the master's address is the same."""
    await producer.send(Message("a"))
    group = producer._senders.of(is_delayed=False)._groups["g1"]
    breaker = group.breaker
    metaserver.set_group(broker, writable=False)
    metaserver.set_group(broker, writable=True)
    await producer.send(Message("a"))
    assert group.breaker is breaker
    metaserver.set_group(broker, term=2)
    await until_async(lambda: group.breaker is not breaker)


@pytest.mark.parametrize("error", [ValueError("mine alone"), asyncio.CancelledError()], ids=["error", "cancellation"])
async def test_callbacks_that_raise_leave_their_batch_alone(error, broker, producer):
    """Gap of QMQ, section 2: the other messages of the request get no callback and no resend."""
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["message"]))
    await producer.send(Message("a", {"n": "connected"}))
    receipts: list[qmq.Receipt] = []

    def fail(receipt: qmq.Receipt) -> None:
        receipts.append(receipt)
        raise error

    for message in numbered(20):
        producer.send_nowait(message, fail)
    await producer.flush()
    assert len(receipts) == 20 and broker.attempts[-1].count == 20
    assert failures == ["on_done of send_nowait failed"] * 20


async def test_a_callback_may_send_the_next_message(broker, producer):
    left = iter(range(50))

    def again(_: qmq.Receipt) -> None:
        if (number := next(left, None)) is not None:
            producer.send_nowait(Message("a", {"n": str(number)}), again)

    again(None)  # type: ignore[arg-type]
    await until_async(lambda: len(broker.subjects["a"]) == 50)
    assert properties(broker) == [str(number) for number in range(50)]


async def test_resending_callback_blocks_no_other():
    """Regression: endless loop in one call, refused and sent again."""

    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, readonly_wait_s=0.0) as producer:
        await producer.send(Message("a", {"n": "connected"}))
        broker.refuse_with = BrokerReadOnly("no slave")
        calls = 0

        def again(receipt: qmq.Receipt) -> None:
            nonlocal calls
            calls += 1
            if not receipt.is_stored and calls < 1_000:
                producer.send_nowait(Message("a", {"n": "1"}), again)

        producer.send_nowait(Message("a", {"n": "1"}), again)
        await until_async(lambda: calls)
        assert calls < 1_000, "others had no turn in between"
        broker.refuse_with = None
        await until_async(lambda: properties(broker) == ["connected", "1"])


async def test_resending_too_large_blocks_no_other(broker, producer):
    broker.limit(packet_bytes_max=10_000)
    await producer.send(Message("a", {"n": "connected"}))
    calls, seen = 0, set()

    def again(receipt: qmq.Receipt) -> None:
        nonlocal calls
        calls += 1
        if isinstance(receipt.error, MessageTooLarge) and calls < 5_000:
            producer.send_nowait(Message("a", {"n": "x" * 20_000}), again)

    again(qmq.Receipt(qmq.Outcome.REFUSED, "", "a", "", -1, None, error=MessageTooLarge("20,000 bytes")))
    while calls < 5_000:
        await asyncio.sleep(0)
        seen.add(calls)
    assert len(seen) > 3, "others had no turn in between"


async def test_long_derived_subject_is_sent(producer):
    """Rule: retry and dead-letter subjects are exempt from the length of a subject."""
    subject = f"%RETRY%{'s' * 100}%{'g' * 100}"
    assert (await producer.send(Message(subject, {"n": "1"}))).is_stored
    for illegal in ("s" * 101, "", "a/b", "a\nb", "a\rb", " a", "a\u2028b", f"%RETRY%{'s' * 101}%g"):
        with pytest.raises(qmq.InvalidName):
            await producer.send(Message(illegal))


async def test_full_subject_is_refused_at_once():
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, timeout_s=60) as producer:

        def on_produce(connection, packet, attempt) -> bool:
            if attempt.subject == "full":
                connection.refuse(packet, SubjectFull("10 messages of full wait for g at g1"))
            return attempt.subject == "full"

        broker.on_produce = on_produce
        async with asyncio.timeout(20):
            full, many = await producer.send(Message("full")), await producer.send_many([Message("full")] * 1)
            assert [receipt.outcome for receipt in (full, *many)] == [qmq.Outcome.REFUSED] * 2
            assert isinstance(full.error, SubjectFull) and "wait for g" in full.reason
        begin = time.monotonic()
        for _ in range(20):
            await producer.send(Message("full"))
            assert (await producer.send(Message("other"))).is_stored
        assert time.monotonic() - begin < 2 * REST_MS_MAX / 1000, "the group does not rest for that"
