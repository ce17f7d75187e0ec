"""Shell. Producer against brokers that lose answers, refuse, change and fail, over real sockets."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import qmq
from qmq.client.producer import _id_prefix
from qmq.client.routes import Routing
from qmq.codec import decode_message
from qmq.errors import BrokerReadOnly, InvalidMessage, InvalidRequest, NotMaster, OutcomeUnknown, Overloaded
from qmq.message import Message
from qmq.remoting.commands import Command
from qmq.remoting.connection import Connection
from qmq.remoting.packet import Packet
from tests.support.waiting import settle, until_async
from tests.unit.client.world import LocalBroker, cluster, producer_of


def properties(broker: LocalBroker, subject: str = "a") -> list[str]:
    return [str(decode_message(data)["n"]) for data in broker.subjects[subject]]


def numbered(count: int, subject: str = "a") -> list[Message]:
    return [Message(subject, {"n": str(number)}) for number in range(count)]


async def test_waiting_messages_form_one_batch():
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, in_flight_max=1) as producer:
        await producer.send(Message("a", {"n": "first"}))
        broker.holds.add(Command.PRODUCE)
        sends = [asyncio.create_task(producer.send(Message("a", {"n": "0"})))]
        await until_async(lambda: broker.held)
        sends += [asyncio.create_task(producer.send(message)) for message in numbered(100)]
        await asyncio.sleep(0)
        broker.release()
        receipts = await asyncio.gather(*sends)
        assert [attempt.count for attempt in broker.attempts] == [1, 1, 100]
        assert [receipt.sequence for receipt in receipts] == list(range(1, 102))
        assert all(receipt.is_stored for receipt in receipts)


async def test_messages_of_one_turn_form_one_batch(broker, producer):
    await producer.send(Message("a", {"n": "connected"}))
    await asyncio.gather(*(producer.send(message) for message in numbered(50)))
    assert [attempt.count for attempt in broker.attempts] == [1, 50]


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored before the loss", "lost before it was stored"])
async def test_lost_answer_repeats_the_batch(is_stored):
    async with cluster("g1", "g2") as (metaserver, brokers), producer_of(metaserver) as producer:
        await asyncio.gather(*(producer.send(Message("a", {"n": -1})) for _ in range(2)))
        await until_async(lambda: all(broker.connections for broker in brokers))
        earlier = {broker.name: len(broker.attempts) for broker in brokers}

        def lose(connection: Connection, *_: object) -> bool:
            for broker in brokers:
                broker.on_produce = broker.on_answer = lambda *_: False
            connection.abort("the test loses a packet")
            return True

        for broker in brokers:
            setattr(broker, "on_answer" if is_stored else "on_produce", lose)
        receipt = await producer.send(Message("a", {"n": "7"}))
        assert receipt.is_stored
        new = [attempt for broker in brokers for attempt in broker.attempts[earlier[broker.name] :]]
        assert new == [new[0]] * 2, "the same producer, number and bytes, twice"
        touched = [broker for broker in brokers if len(broker.attempts) > earlier[broker.name]]
        assert [broker.name for broker in touched] == [receipt.broker_group]
        assert sum(properties(broker).count("7") for broker in brokers) == 1


async def test_late_answer_reconnects_and_stores_once():
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, answer_timeout_s=0.2) as producer:
        await producer.send(Message("a", {"n": "0"}))

        def stay_silent(connection: Connection, request: Packet) -> bool:
            broker.on_answer = lambda *_: False
            return True

        broker.on_answer = stay_silent
        assert (await producer.send(Message("a", {"n": "1"}))).sequence == 1
        assert broker.attempts[-1] == broker.attempts[-2]
        assert properties(broker) == ["0", "1"]


@pytest.mark.parametrize("error", [BrokerReadOnly("slave_down"), NotMaster("old route"), Overloaded("full")])
async def test_refusal_moves_the_batch(error):
    async with cluster("g1", "g2") as (metaserver, brokers), producer_of(metaserver) as producer:
        brokers[0].refuse_with = error
        receipts = [await producer.send(message) for message in numbered(10)]
        assert {receipt.broker_group for receipt in receipts} == {"g2"}
        assert properties(brokers[1]) == [str(number) for number in range(10)]
        numbers = [attempt.batch for attempt in brokers[1].attempts]
        assert numbers == sorted(numbers), "numbers of a group ascend"


async def test_refusals_do_not_scan_all_subjects(monkeypatch):
    subjects, looks = 1_000, 0
    choose = Routing.choose

    def counted(*args: Any, **options: Any) -> str | None:
        nonlocal looks
        looks += 1
        return choose(*args, **options)

    monkeypatch.setattr(Routing, "choose", counted)
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver) as producer:
        await producer.send(Message("a", {}))
        broker.refuse_with = BrokerReadOnly("g1: its roles are exchanged")
        messages = [Message(f"s{number}", {}) for number in range(subjects)]
        sending = asyncio.create_task(producer.send_many(messages))
        await until_async(lambda: len(broker.attempts) > 60)
        broker.refuse_with = None
        assert (await sending).all_stored
    assert looks < 10 * subjects


async def test_silent_broker_is_left():
    async with cluster("g1", "g2") as (metaserver, brokers), producer_of(metaserver) as producer:
        await brokers[0].stop()
        receipts = [await producer.send(message) for message in numbered(5)]
        assert {receipt.broker_group for receipt in receipts} == {"g2"}


async def test_possibly_stored_batch_never_moves():
    async with cluster("g1", "g2") as (metaserver, [first, second]), producer_of(metaserver) as producer:
        second.refuse_with = BrokerReadOnly("operator")
        await producer.send(Message("a", {"n": "0"}))

        first.lose_answer(Command.PRODUCE, lambda: setattr(first, "refuse_with", BrokerReadOnly("slave_down")))
        count = len(first.attempts)
        sending = asyncio.create_task(producer.send(Message("a", {"n": "1"})))
        await until_async(lambda: len(first.attempts) >= count + 2)  # lost, then refused as readonly
        second.refuse_with = None
        other = await producer.send(Message("a", {"n": "2"}))
        await until_async(lambda: len(first.attempts) >= count + 3)
        first.refuse_with = None
        receipt = await sending
        assert (other.broker_group, receipt.broker_group, receipt.outcome) == ("g2", "g1", qmq.Outcome.STORED)
        assert properties(first) == ["0", "1"]
        assert "1" not in properties(second)


async def test_no_answer_makes_the_outcome_unknown():
    async with cluster("g1", "g2") as (metaserver, brokers):
        async with producer_of(metaserver, timeout_s=4.0, answer_timeout_s=0.4) as producer:
            for broker in brokers:
                broker.holds.add(Command.PRODUCE)
            receipt = await producer.send(Message("a", {"n": "1"}, id="mine"))
            assert (receipt.outcome, receipt.message_id, receipt.sequence) == (qmq.Outcome.UNKNOWN, "mine", -1)
            with pytest.raises(OutcomeUnknown):
                receipt.check()
            touched = [broker.name for broker in brokers if broker.held]
            assert touched == [receipt.broker_group]
            attempts = [attempt for broker in brokers for attempt in broker.attempts]
            assert len(attempts) >= 2 and all(attempt == attempts[0] for attempt in attempts)


async def test_slow_upload_is_not_repeated(monkeypatch, metaserver, broker):
    """A body of 64 MiB takes 5.4 s at 100 Mbit/s; the connection was closed after 5 s, again and again."""
    async with producer_of(metaserver, answer_timeout_s=0.2) as producer:
        await producer.send(Message("a", {}))
        broker.holds.add(Command.PRODUCE)
        left = iter(range(50, 0, -1))
        monkeypatch.setattr(Connection, "unsent_bytes", property(lambda _: next(left, 0)))
        sending = asyncio.create_task(producer.send(Message("a", {})))
        await until_async(lambda: len(broker.held) > 1)
        assert next(left, 0) == 0, "not repeated while the broker took bytes"
        broker.release()
        assert (await sending).is_stored


async def test_a_final_refusal_is_not_repeated():
    async with cluster("g1", "g2") as (metaserver, brokers), producer_of(metaserver) as producer:
        for broker in brokers:
            broker.refuse_with = InvalidRequest("no")
        assert (await producer.send(Message("a", {"n": "1"}))).outcome is qmq.Outcome.REFUSED
        assert sum(len(broker.attempts) for broker in brokers) == 1


async def test_faulty_message_affects_no_other(broker, producer):
    broker.limit(message_bytes_max=10_000)
    messages = numbered(2500)
    faulty = {
        0: Message("a", {"n": "x" * 40_000}, id="long"),
        700: Message("a", {"n": "x" * 20_000}, id="refused by the broker"),
        701: Message("a/b", {"n": "slash"}, id="no subject"),
        2499: Message("a", {"n": [1]}, id="no property"),  # type: ignore[dict-item]
    }
    for at, message in faulty.items():
        messages[at] = message
    receipts = await producer.send_many(messages)
    refused = [at for at, receipt in enumerate(receipts) if receipt.outcome is qmq.Outcome.REFUSED]
    assert refused == list(faulty) and [receipts[at].message_id for at in refused] == [m.id for m in faulty.values()]
    assert all(receipts[at].reason for at in refused) and isinstance(receipts[700].error, InvalidMessage)
    kept = [at for at in range(2500) if at not in faulty]
    assert properties(broker) == [str(at) for at in kept]
    assert [receipts[at].check().sequence for at in kept] == list(range(2496))
    assert receipts.count_of(qmq.Outcome.STORED) == 2496 and not receipts.all_stored


async def test_ids_are_kept_through_retries(broker, producer):
    broker.refuse_with = BrokerReadOnly("for a moment")
    made, given = Message("a", {"n": "1"}), Message("a", {"n": "2"}, id="mine")
    sending = [asyncio.create_task(producer.send(message)) for message in (made, given)]
    await until_async(lambda: len(broker.attempts) >= 2)
    broker.refuse_with = None
    receipts = await asyncio.gather(*sending)
    ids = [decode_message(data).id for data in broker.subjects["a"]]
    assert ids == [made.id, "mine"] == [receipt.message_id for receipt in receipts]
    more = await producer.send_many(numbered(2500))
    all_ids = {decode_message(data).id for data in broker.subjects["a"]}
    assert len(all_ids) == 2502
    assert {receipt.message_id for receipt in more} < all_ids
    form = re.compile(r"\d{6}\.\d{6}\.\d+\.\d+\.\d+\.\d+\.\d+\.-?\d+")
    assert [id for id in all_ids if not form.fullmatch(str(id))] == ["mine"], "ids have the form of QMQ's"


async def test_window_limits_are_kept(metaserver, broker):
    broker.limit(window_bytes=40_000)
    async with producer_of(metaserver, in_flight_max=64) as producer:
        broker.holds.add(Command.PRODUCE)
        sends = []
        for _number in range(60):
            sends.append(asyncio.create_task(producer.send(Message("a", {"n": "x" * 2_000}))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await until_async(lambda: broker.held)
        await settle()
        assert sum(len(attempt.body) for attempt in broker.attempts) <= 40_000
        broker.release()
        assert all(receipt.is_stored for receipt in await asyncio.gather(*sends))


async def test_advised_batches_are_small(broker, producer):
    async def largest(batch_bytes: int, messages: list[Message]) -> int:
        broker.batch_bytes = batch_bytes
        await producer.send(Message("a", {"n": "x"}))  # its answer has the current advice
        begin = len(broker.attempts)
        assert (await producer.send_many(messages)).all_stored
        return max(len(attempt.body) for attempt in broker.attempts[begin:])

    uniform = [Message("a", {"n": "x" * 1_000}) for _ in range(1_000)]
    mixed = [Message(subject, {"n": "x" * 1_000}) for _ in range(500) for subject in "ab"]
    for messages in (uniform, mixed):
        assert await largest(0, messages) > 500_000
        assert 100_000 < await largest(128 << 10, messages) < 140_000

    begin, receipts = len(broker.attempts), []
    for message in uniform:
        producer.send_nowait(message, receipts.append)
    await until_async(lambda: len(receipts) == len(uniform))
    assert max(len(attempt.body) for attempt in broker.attempts[begin:]) < 140_000


async def test_advice_ends_with_readonly():
    """Regression: without requests, no answer would withdraw the advice."""

    async with cluster("g1", "g2") as (metaserver, [away, there]), producer_of(metaserver) as producer:
        away.batch_bytes = 64 << 10
        while not (away.attempts and there.attempts):
            await producer.send(Message("a", {"n": "x"}))
        metaserver.set_group(away, writable=False)
        [sender] = producer._open_senders._all
        await until_async(lambda: not all(group.writable for group in sender._routing.groups_of("a")))
        begin = len(there.attempts)
        assert (await producer.send_many(Message("a", {"n": "x" * 1_000}) for _ in range(1_000))).all_stored
        assert max(len(attempt.body) for attempt in there.attempts[begin:]) > 500_000


@pytest.mark.parametrize("subjects, most", [("a", 7), ("abcdefghijkl", 30)], ids=["one subject", "several"])
async def test_send_many_reads_bounded_bytes_ahead(subjects, most):
    """A generator of bodies of 32 MiB took 32 GB: 1,000 messages were read at once."""
    body, count, read = bytes(300_000), 60, 0

    def messages() -> Iterator[Message]:
        nonlocal read
        for read in range(1, count + 1):
            yield Message(subjects[read % len(subjects)], body=body)

    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, queue_bytes_max=1 << 20) as producer:
        broker.holds.add(Command.PRODUCE)
        sending = asyncio.create_task(producer.send_many(messages()))
        await until_async(lambda: broker.held and producer._backlog.waiters)
        ahead = read
        broker.release()
        assert (await sending).all_stored
        assert ahead <= most and read == count


async def test_calls_keep_their_order_when_one_is_woken():
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, in_flight_max=1) as producer:
        broker.holds.add(Command.PRODUCE)
        sending = list[asyncio.Task[Any]]()

        def send(n: str) -> None:
            sending.append(asyncio.create_task(producer.send_many([Message("a", {"n": n})])))

        for n in "123":
            send(n)  # one is in flight, two are ready
        await until_async(lambda: broker.held and len(producer._senders.of(is_delayed=False).queue("a").ready) == 2)
        producer._backlog.waiters.append(lambda: send("5"))  # runs before the next call, which is woken after it
        send("4")
        await settle()
        broker.release()
        await asyncio.gather(*sending)
        await until_async(lambda: len(sending) == 5 and all(task.done() for task in sending))
        assert properties(broker) == [*"12345"]


async def test_oversized_batch_is_split(metaserver, broker):
    broker.limit(packet_bytes_max=20_000)
    async with producer_of(metaserver) as producer:
        messages = numbered(200)
        for message in messages[:100]:
            message.properties = {"n": message["n"], "text": "x" * 1_000}
        messages[50] = Message("a", {"n": "x" * 30_000})
        receipts = await producer.send_many(messages)
        refused = [at for at, receipt in enumerate(receipts) if not receipt.is_stored]
        assert refused == [50]
        assert "exceed the request limit of g1" in receipts[50].reason
        assert properties(broker) == [str(at) for at in range(200) if at != 50]
        assert max(len(attempt.body) for attempt in broker.attempts) < 20_000


async def test_new_master_stores_repeats_once():
    async with cluster("g1") as (metaserver, [old]), producer_of(metaserver) as producer:
        await producer.send(Message("a", {"n": "before"}))
        new = LocalBroker("g1", slave_of=old)
        await new.start()
        lost = asyncio.Event()
        old.lose_answer(Command.PRODUCE, lambda: (old.move_to(new), lost.set()))
        sending = asyncio.create_task(producer.send(Message("a", {"n": "during"})))
        await lost.wait()
        metaserver.set_group(new, term=2)
        receipt = await sending
        assert (receipt.outcome, receipt.sequence) == (qmq.Outcome.STORED, 1)
        assert new.attempts == old.attempts[-1:]
        assert (await producer.send(Message("a", {"n": "after"}))).sequence == 2
        assert properties(new) == ["before", "during", "after"]
        await new.stop()


async def test_routes_survive_a_metaserver_outage(metaserver, broker, producer):
    await producer.send(Message("a", {"n": "0"}))
    port = metaserver.http_port
    await metaserver.stop()
    assert (await producer.send(Message("a", {"n": "1"}))).is_stored
    moved = LocalBroker("g1", slave_of=broker)
    await moved.start()
    broker.move_to(moved)
    metaserver.set_group(moved, term=2)
    await metaserver.start(http_port=port)
    assert (await producer.send(Message("a", {"n": "2"}))).is_stored
    assert [attempt.count for attempt in moved.attempts] == [1]
    await moved.stop()


async def test_close_waits_for_outcomes(metaserver, broker):
    receipts: list[qmq.Receipt] = []
    async with producer_of(metaserver) as producer:
        for message in numbered(3000):
            producer.send_nowait(message, receipts.append)
        with pytest.raises(qmq.ClientClosed, match="open already"):
            await producer.__aenter__()
    assert len(receipts) == 3000 and len(broker.subjects["a"]) == 3000


async def test_closed_producer_opens_again_as_another_one(metaserver, broker):
    producer, ids = producer_of(metaserver), []
    for n in range(2):
        async with producer:
            ids.append(producer.id)
            assert (await producer.send(Message("a", {"n": str(n)}))).is_stored
    assert ids[0] != ids[1] and len(broker.subjects["a"]) == 2


async def test_wrong_token_is_refused_at_once(metaserver):
    async with qmq.Producer(metaserver=metaserver.url, app="test", token="wrong") as producer:
        receipt = await producer.send(Message("a", {"n": "1"}))
        assert receipt.outcome is qmq.Outcome.REFUSED
        assert "token" in receipt.reason


@pytest.mark.parametrize("host", ["qmq.internal", "127.0.0.1", "[::1]", "[fd00::2]"])
def test_message_ids_need_no_name_server(monkeypatch, host):
    """A fixed bug: a silent name server stopped the event loop for 40 s."""
    reached = []

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            reached.append(str(ipaddress.IPv4Address(address[0])))
            super().connect(address)

    monkeypatch.setattr("qmq.client.producer.socket.socket", Probe)
    assert ipaddress.IPv4Address(_id_prefix(f"http://{host}:8080").split(".", 2)[2].rsplit(".", 2)[0])
    assert reached == ["127.0.0.1" if host == "127.0.0.1" else "192.0.2.1"]
