"""Clients without an event loop: threads and callbacks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

import qmq
import qmq.blocking
from qmq.errors import ClientClosed, InvalidMessage, InvalidRequest, NoAnswer, QueueFull
from qmq.idempotence import Idempotence, MemoryKeys

APP = {"app": "test"}


@pytest.fixture
def broker(qmq_blocking_broker):
    return qmq_blocking_broker


@pytest.fixture
def producer(broker):
    with qmq.blocking.Producer(metaserver=broker.metaserver, **APP) as producer:
        yield producer


def numbers(messages):
    return [int(message["n"]) for message in messages]


def message(n, subject="s"):
    return qmq.Message(subject, {"n": str(n)})


# A producer in threads.


def test_threads_that_share_a_producer_all_get_their_receipts(broker, producer):
    receipts = []

    def work(begin):
        for n in range(begin, begin + 20):
            receipts.append(producer.send(message(n)))

    threads = [threading.Thread(target=work, args=(begin,)) for begin in range(0, 160, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receipts) == 160 and all(receipt.is_stored for receipt in receipts)
    assert sorted(numbers(broker.messages("s"))) == list(range(160))


def test_send_many_reads_the_iterable_in_the_calling_thread(broker, producer):
    threads = set()

    def source():
        for n in range(25_000):
            threads.add(threading.current_thread())
            yield message(n)

    receipts = producer.send_many(source())
    assert len(receipts) == 25_000 and receipts.all_stored
    assert threads == {threading.current_thread()}
    assert numbers(broker.messages("s")) == list(range(25_000))
    assert [receipt.sequence for receipt in receipts[9_998:10_002]] == [9_998, 9_999, 10_000, 10_001]


def test_an_error_of_the_iterable_is_passed_on(producer):
    def source():
        yield message(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        producer.send_many(source())


def test_send_nowait_brings_receipts_by_future_and_by_callback(broker, producer):
    called = []
    futures = [producer.send_nowait(message(n), called.append) for n in range(3_000)]
    producer.flush()
    assert [future.result().sequence for future in futures] == list(range(3_000))
    assert [receipt.sequence for receipt in called] == list(range(3_000))
    assert numbers(broker.messages("s")) == list(range(3_000))


def test_invalid_message_fails_only_its_own_future(broker, producer):
    bad = producer.send_nowait(qmq.Message("s", {"n": "x" * 40_000}))
    worse = producer.send_nowait(qmq.Message(None))
    good = producer.send_nowait(message(1))
    assert not good.cancel()
    assert isinstance(bad.exception(5), InvalidMessage)
    assert worse.exception(5) is not None
    assert good.result(5).is_stored


def test_send_nowait_refuses_messages_over_its_bounds(broker):
    broker.readonly()
    with qmq.blocking.Producer(metaserver=broker.metaserver, queue_messages_max=10, **APP) as producer:
        futures = [producer.send_nowait(message(n)) for n in range(10)]
        with pytest.raises(QueueFull):
            producer.send_nowait(message(10))
        with pytest.raises(TimeoutError, match="10 messages"):
            producer.flush(0.05)
        broker.writable()
        producer.flush()
        assert all(future.result().is_stored for future in futures)
    with qmq.blocking.Producer(metaserver=broker.metaserver, queue_bytes_max=10_000, **APP) as producer:
        with pytest.raises(QueueFull):
            for _ in range(100):
                producer.send_nowait(qmq.Message("large", {"n": "x" * 5_000}))


def test_a_callback_that_waits_is_refused_instead_of_hanging(producer):
    errors = []

    def on_done(receipt):
        try:
            producer.send(message(2))
        except InvalidRequest as error:
            errors.append(error)

    producer.send_nowait(message(1), on_done)
    producer.flush()
    assert len(errors) == 1


def test_a_callback_may_send_on(broker, producer):
    futures = []
    producer.send_nowait(message(1), lambda receipt: futures.append(producer.send_nowait(message(2))))
    producer.flush()
    assert futures[0].result().is_stored
    assert numbers(broker.messages("s")) == [1, 2]


def test_producer_connects_on_first_use_and_closes_once(broker):
    producer = qmq.blocking.Producer(metaserver=broker.metaserver, **APP)
    assert producer.send(message(1)).is_stored
    producer.close()
    producer.close()
    with pytest.raises(ClientClosed):
        producer.send(message(2))


def test_wrong_arguments_are_refused_before_the_first_use():
    with pytest.raises(InvalidRequest):
        qmq.blocking.Producer(metaserver="http://127.0.0.1:1", in_flight_max=1_000, **APP)


# A consumer.


@pytest.fixture
def consumer(broker):
    return qmq.blocking.Consumer(metaserver=broker.metaserver, **APP)


@contextmanager
def running(consumer):
    """Run a consumer in a thread; raise its error at the end."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(consumer.run)
        try:
            yield run
        finally:
            consumer.stop()
        run.result(60)


def test_listener_is_a_function_in_its_own_thread(broker, producer, consumer):
    seen = []

    @consumer.listen("s", group="g", start="earliest")
    def on_message(message):
        seen.append((int(message["n"]), message.times, threading.current_thread()))

    producer.send_many(message(n) for n in range(50))
    with running(consumer):
        broker.wait_until_consumed("s", "g")
    assert [n for n, _, _ in seen] == list(range(50))
    assert {times for _, times, _ in seen} == {1}
    assert not {thread for _, _, thread in seen} & {threading.current_thread(), threading.main_thread()}


def test_filters_wrap_plain_handlers(broker, producer, consumer):
    seen = []

    def twice(message, handle):
        handle(message)
        handle(message)

    @consumer.listen("s", group="g", start="earliest", filters=[twice])
    def on_message(message):
        seen.append(message["n"])

    producer.send(message(7))
    with running(consumer):
        broker.wait_until_consumed("s", "g")
    assert seen == ["7", "7"]


def test_listeners_change_while_the_consumer_runs(broker, producer, consumer):
    seen = []

    @consumer.listen("s", group="g", start="earliest")
    def on_message(message):
        seen.append(message["n"])

    listener = consumer.listeners["s", "g"]
    with running(consumer):
        broker.wait_until_subscribed("s", "g")
        listener.stop()
        broker.wait_until_subscribed("s", "g", consumers=0)
        producer.send(message(1))
        with pytest.raises(TimeoutError, match="1 messages to be delivered"):
            broker.wait_until_consumed("s", "g", timeout=0.1)
        listener.concurrency = 3
        listener.resume()
        broker.wait_until_consumed("s", "g")
        consumer.listen("other", group="g", start="earliest")(lambda message: seen.append(message["n"]))
        producer.send(message(2, "other"))
        broker.wait_until_consumed("other", "g")
    assert seen == ["1", "2"] and listener.concurrency == 3


def test_coroutine_functions_and_second_runs_are_refused(broker, consumer):
    with pytest.raises(InvalidRequest, match="plain function"):

        @consumer.listen("s", group="g")
        async def on_message(message): ...

    @consumer.listen("s", group="g")
    def on_plain_message(message): ...

    with running(consumer):
        broker.wait_until_subscribed("s", "g")
        with pytest.raises(InvalidRequest, match="runs already"):
            consumer.run()


def test_run_raises_the_error_of_its_subscription(broker):
    consumers = [qmq.blocking.Consumer(metaserver=broker.metaserver, consumer_id="same", **APP) for _ in range(2)]
    for consumer in consumers:
        consumer.listen("s", group="g")(lambda message: None)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(consumers[0].run)
        broker.wait_until_subscribed("s", "g")
        second = pool.submit(consumers[1].run)
        with pytest.raises(qmq.SubscriptionReplaced):
            first.result(10)
        consumers[1].stop()
        second.result(10)


def test_master_change_is_reported(broker, producer, consumer):
    events = SimpleQueue()
    consumer.on_master_changed(events.put)

    @consumer.listen("s", group="g", start="earliest")
    def on_message(message): ...

    producer.send(message(1))
    with running(consumer):
        broker.wait_until_consumed("s", "g")
        broker.swap_roles()
        assert events.get(timeout=120).broker_group == "test"
        producer.send(message(2))
        broker.wait_until_consumed("s", "g")


def test_a_puller_takes_acks_and_releases(broker, producer, consumer):
    producer.send_many(message(n) for n in range(10))
    with consumer.pull("s", group="g", start="earliest") as puller:
        first = puller.pull(4, timeout=5)
        puller.ack(first)
        puller.flush()
        second = puller.pull(2, timeout=5)
        puller.nack(second, "later", delay=3600)
        puller.dead_letter(puller.pull(1, timeout=5), "never")
        puller.flush()
        third = puller.pull(100, timeout=5)
        assert numbers(first + second) == [0, 1, 2, 3, 4, 5]
        assert numbers(third) == [7, 8, 9]
        assert puller.pull(1, timeout=0) == []
    assert numbers(broker.dead_letters("s", "g")) == [6]
    with consumer.pull("s", group="g") as puller:
        assert numbers(puller.pull(100, timeout=5)) == [7, 8, 9]  # undecided messages are requeued at once
        broker.advance(3600)
        assert numbers(puller.pull(100, timeout=5)) == [4, 5]
    with pytest.raises(ClientClosed):
        puller.pull(1, timeout=0)


def test_a_filter_of_coroutines_guards_a_plain_handler(broker, producer, consumer):
    seen = []

    @consumer.listen("s", group="g", start="earliest", filters=[Idempotence(MemoryKeys())])
    def on_message(message):
        seen.append(message["n"])

    producer.send_many([qmq.Message("s", {"n": str(n)}, id=str(n % 3)) for n in range(9)])
    with running(consumer):
        broker.wait_until_consumed("s", "g")
    assert seen == ["0", "1", "2"]


# Request and reply.


@pytest.fixture
def requester(producer, consumer):
    with qmq.blocking.Requester(producer, consumer, reply_subject="answers") as requester:
        yield requester


def test_each_thread_gets_the_answer_to_its_own_request(producer, consumer, requester):
    @consumer.listen("ask", group="g", start="earliest", concurrency=2)
    def on_request(message):
        qmq.blocking.reply(producer, message, qmq.Message("", {"n": 2 * message.get_int("n")}))

    with running(consumer), ThreadPoolExecutor(8) as pool:
        ask = [pool.submit(requester.request, message(n, "ask"), timeout=120) for n in range(50)]
        assert numbers(answer.result() for answer in ask) == [2 * n for n in range(50)]


def test_request_times_out_and_closed_requester_sends_nothing(requester):
    with pytest.raises(NoAnswer):
        requester.request(message(1, "ask"), timeout=0.2)
    requester.close()
    with pytest.raises(ClientClosed):
        requester.request(message(1, "ask"), timeout=0.2)
