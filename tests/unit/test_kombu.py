"""Shell. kombu on qmq, through kombu's own interface: queues, acks, rejections, prefetch, ETA."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import kombu
import pytest
from kombu.exceptions import ChannelError

import qmq
import qmq.blocking
import qmq.kombu
from tests.support.waiting import until

QUEUE = kombu.Queue("jobs", kombu.Exchange("jobs"), routing_key="jobs")


@pytest.fixture
def broker(qmq_blocking_broker):
    return qmq_blocking_broker


def connecting(broker, **options):
    address = broker.metaserver.removeprefix("http://")
    return kombu.Connection(f"qmq://{address}", transport_options=options)


@pytest.fixture
def connection(broker):
    with connecting(broker) as connection:
        yield connection


def publish(connection, *payloads, **more):
    with connection.Producer() as producer:
        for payload in payloads:
            producer.publish(payload, exchange=QUEUE.exchange, routing_key="jobs", declare=[QUEUE], **more)


class Worker:
    """Consumer of a channel; keeps its messages."""

    def __init__(self, connection, *, prefetch=0, no_ack=False):
        self.got = []
        self._connection = connection
        channel = connection.channel()
        self.consumer = kombu.Consumer(channel, [QUEUE], callbacks=[self._take], no_ack=no_ack)
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def _take(self, payload, message):
        self.got.append(message)

    def drain(self, count, timeout=10):
        """Wait for messages and return the last ones."""
        for _ in range(count):
            self._connection.drain_events(timeout=timeout)
        return self.got[-count:]


def test_sent_payloads_arrive_in_order(broker, connection):
    publish(connection, *({"n": n} for n in range(20)))
    worker = Worker(connection)
    for message in worker.drain(20):
        message.ack()
    assert [message.payload["n"] for message in worker.got] == list(range(20))
    broker.wait_until_consumed("jobs", "celery")
    assert worker.got[0].delivery_info == {"exchange": "jobs", "routing_key": "jobs", "redelivered": False}


def test_large_and_binary_payloads_arrive(connection):
    publish(connection, "x" * 300_000)
    publish(connection, b"\x00\xff" * 10, serializer="raw", content_type="application/data")
    text, data = Worker(connection).drain(2)
    assert (text.payload, bytes(data.payload)) == ("x" * 300_000, b"\x00\xff" * 10)


def test_requeued_task_is_redelivered(broker, connection):
    publish(connection, 1)
    worker = Worker(connection)
    worker.drain(1)[0].requeue()
    (again,) = worker.drain(1)
    assert (again.payload, again.delivery_info["redelivered"]) == (1, True)
    again.ack()
    broker.wait_until_consumed("jobs", "celery")


def test_rejected_task_is_a_dead_letter(broker, connection):
    publish(connection, 1)
    Worker(connection).drain(1)[0].reject()
    broker.wait_until_consumed("jobs", "celery")
    (dead,) = broker.dead_letters("jobs", "celery")
    assert dead["qmq_deadReason"] == "rejected by kombu"


def test_foreign_message_is_a_dead_letter(broker, connection):
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="shop") as producer:
        producer.send_many([qmq.Message("jobs", {"n": 1}), qmq.Message("jobs", {"kombu": '{"body": ""}'})])
    publish(connection, 1)
    assert Worker(connection).drain(1)[0].payload == 1
    broker.wait_until_stored("%DEAD_RETRY%jobs%celery", 2)
    reasons = [dead["qmq_deadReason"] for dead in broker.dead_letters("jobs", "celery")]
    assert all(
        reason.startswith("the message is not of kombu: its property 'kombu' is missing or unreadable: ")
        for reason in reasons
    )


def test_prefetch_count_bounds_unacked_tasks(connection):
    publish(connection, 1, 2, 3)
    worker = Worker(connection, prefetch=2)
    worker.drain(2)
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.3)
    worker.got[0].ack()
    assert worker.drain(1)[0].payload == 3


def test_unacked_tasks_return_when_the_connection_closes(broker):
    with connecting(broker) as first:
        publish(first, 1, 2)
        Worker(first).drain(1)
    with connecting(broker) as second:
        assert {message.payload for message in Worker(second).drain(2)} == {1, 2}


def test_tasks_without_acks_are_taken_once(broker, connection):
    publish(connection, 1)
    message = Worker(connection, no_ack=True).drain(1)[0]
    broker.wait_until_consumed("jobs", "celery")
    message.ack()  # kombu's SimpleBuffer does


NEWS = kombu.Exchange("news", type="fanout")


def listen_to(connection, *queues):
    """Consume queues on one channel; return the payloads of their messages, which are acked."""
    got = []

    def take(payload, message):
        got.append(payload)
        message.ack()

    kombu.Consumer(connection.channel(), queues, callbacks=[take]).consume()
    return got


def tell(broker, *payloads):
    with connecting(broker) as connection, connection.Producer() as producer:
        for payload in payloads:
            producer.publish(payload, exchange=NEWS, declare=[NEWS])


def drained(connection, got, count):
    with suppress(socket.timeout):
        connection.drain_events(timeout=0.2)
    return len(got) >= count


def test_fanout_reaches_each_queue(broker, connection):
    queues = [kombu.Queue(name, NEWS) for name in ("mail", "stock")]
    got = listen_to(connection, *queues)
    for queue in queues:
        broker.wait_until_subscribed("news.fanout", queue.name)
    tell(broker, 1, 2)
    until(lambda: drained(connection, got, 4), "both queues have both messages")
    assert sorted(got) == [1, 1, 2, 2]
    for queue in queues:
        broker.wait_until_consumed("news.fanout", queue.name)


def test_fanout_reaches_each_process_with_a_transient_queue(broker):
    with connecting(broker) as first, connecting(broker) as second:
        connections = (first, second)
        queues = [kombu.Queue(f"bcast.{n}", NEWS, exclusive=True, auto_delete=True) for n in range(2)]
        got = [listen_to(connection, queue) for connection, queue in zip(connections, queues)]
        for connection in connections:
            broker.wait_until_subscribed("news.fanout", connection.transport.consumer.id)
        tell(broker, 1)
        for connection, own in zip(connections, got):
            until(lambda connection=connection, own=own: drained(connection, own, 1), "each has the message")
        assert got == [[1], [1]]


def test_fanout_reaches_queues_that_were_only_declared(broker, connection):
    queues = [kombu.Queue("mail", NEWS), kombu.Queue("bcast", NEWS, exclusive=True, auto_delete=True)]
    channel = connection.channel()
    for queue in queues:
        queue.bind(channel).declare()
    tell(broker, 1)
    got = []
    with kombu.Consumer(channel, queues, callbacks=[lambda payload, message: got.append(payload) or message.ack()]):
        until(lambda: drained(connection, got, 2), "both have the message that was sent before they consumed")


def test_queue_of_a_fanout_without_a_broker_is_an_error():
    with (
        kombu.Connection("qmq://127.0.0.1:1", transport_options={"timeout_s": 0.1}) as connection,
        pytest.raises(qmq.NotServed, match="the queue is not declared at any broker group: news.fanout: "),
    ):
        kombu.Queue("mail", NEWS).bind(connection.channel()).declare()


def test_queue_of_a_fanout_and_another_exchange_is_refused(connection):
    channel = connection.channel()
    kombu.Queue("mail", NEWS).bind(channel).declare()
    with pytest.raises(
        ChannelError, match="'mail' is bound to a fanout exchange and another one. Use a queue for each"
    ):
        kombu.Queue("mail", QUEUE.exchange, routing_key="mail").bind(channel).declare()


def test_purge_counts_ready_tasks(broker, connection):
    publish(connection, 1, 2, 3)
    assert connection.channel().queue_purge("jobs") == 3
    broker.wait_until_consumed("jobs", "celery")


def test_deleted_queue_keeps_its_tasks(broker, connection):
    publish(connection, 1)
    channel = connection.channel()
    channel.queue_delete("jobs", if_empty=True)
    channel.exchange_delete("jobs")
    with connecting(broker) as other:
        assert Worker(other).drain(1)[0].payload == 1


def test_count_names_the_reason_without_an_answer(connection):
    with pytest.raises(ChannelError, match="queue jobs: the metaserver does not count tasks: status 404"):
        connection.channel().queue_declare("jobs", passive=True)


def test_basic_get_returns_none_from_an_empty_queue(connection, monkeypatch):
    monkeypatch.setattr(qmq.kombu, "GET_S", 0.3)
    channel = connection.channel()
    assert channel.basic_get("jobs") is None
    publish(connection, 1)
    monkeypatch.setattr(qmq.kombu, "GET_S", 10)
    assert channel.basic_get("jobs", no_ack=True).decode() == 1


def test_eta_is_a_delay_of_the_broker(broker, connection):
    eta = datetime.now(UTC) + timedelta(hours=1)
    publish(connection, 1, headers={"eta": eta.isoformat()})
    publish(connection, 2, headers={"eta": (eta - timedelta(hours=2)).isoformat()})
    worker = Worker(connection)
    assert worker.drain(1)[0].payload == 2
    assert len(broker.delayed("jobs")) == 1
    broker.advance(3600)
    assert worker.drain(1)[0].payload == 1


def test_eta_without_delay_is_sent_at_once(broker):
    with connecting(broker, delay=False) as connection:
        publish(connection, 1, headers={"eta": "2999-01-01T00:00:00+00:00"})
        assert Worker(connection).drain(1)[0].payload == 1


def test_expired_task_is_not_delivered(broker, connection):
    publish(connection, 1, expiration=0.001)
    stored_s = time.time()
    publish(connection, 2, expiration=3600)
    until(lambda: time.time() > stored_s + 0.001, "the first one has expired")
    assert Worker(connection).drain(1)[0].payload == 2


def test_several_addresses_are_metaservers_of_one_connection(broker):
    address = broker.metaserver.removeprefix("http://")
    with kombu.Connection(f"qmq://nowhere.invalid:1;qmq://{address};qmq://[::1]") as connection:
        expected = ["http://nowhere.invalid:1", broker.metaserver, "http://[::1]:8080"]
        assert connection.transport.metaservers.split(",") == expected


def test_refused_task_raises_and_names_the_reason(broker):
    with connecting(broker, timeout_s=0.5) as connection:
        broker.readonly()
        with pytest.raises(qmq.kombu.NotStored, match="queue jobs: task is refused: .*readonly"):
            publish(connection, 1, headers={})
        with pytest.raises(qmq.kombu.NotStored, match='"delay": False'):
            broker.refuse_next(qmq.InvalidMessage("no"), 1)
            publish(connection, 1, headers={"eta": "2999-01-01T00:00:00+00:00"})


def test_options_choose_subject_group_and_addresses(broker):
    options = {"subject_prefix": "tasks.", "group": "workers", "metaserver": broker.metaserver}
    with kombu.Connection("qmq://nowhere.invalid:1", transport_options=options) as connection:
        publish(connection, 1)
        Worker(connection).drain(1)[0].ack()
    broker.wait_until_consumed("tasks.jobs", "workers")


def test_ack_of_another_thread_wakes_the_worker(connection):
    from threading import Timer

    publish(connection, 1, 2)
    worker = Worker(connection, prefetch=1)
    (first,) = worker.drain(1)
    Timer(0.2, first.ack).start()
    assert worker.drain(1)[0].payload == 2
    until(lambda: first.acknowledged)
