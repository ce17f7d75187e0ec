"""Shell. Listeners against in-memory brokers, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

import qmq
from qmq.client import group_session, handler, listener
from qmq.codec import batch_encoder, encode_message, with_properties
from qmq.dead_letters import delivered
from qmq.errors import InvalidAck
from tests.support.waiting import consuming, settle, until, until_async
from tests.unit.client.world import Handled, cancelled, cluster, consumer_of, fill, handled_by, handling, subscribes


async def test_failed_message_is_retried_without_blocking_others():
    handled, failures = [], []

    async def handle(message: qmq.ReceivedMessage) -> None:
        number = int(message["n"])
        if number == 5 and message.times < 3:
            failures.append(message.times)
            raise ValueError("not now")
        handled.append(number)

    async with handling(handle, 20, retry_delay=0.01) as broker:
        await until_async(lambda: len(handled) == 20 and not broker.unacked())
    assert failures == [1, 2]
    assert handled == [*range(5), *range(6, 20), 5]
    assert [nack.reason for nack in broker.nacks] == ["ValueError('not now')"] * 2


async def test_cancelled_run_finishes_handlers_and_returns_the_rest(consumer, broker):
    fill(broker, range(50))
    gate = asyncio.Event()
    started = handled_by(consumer, gate, concurrency=2)
    task = asyncio.create_task(consumer.run())
    await until_async(lambda: len(started.messages) == 2)
    task.cancel()
    await settle()
    assert not task.done(), "handlers still run"
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert started.numbers == [0, 1]
    pulled = broker.positions["a", "g"]
    assert pulled > 2 and sorted(broker.returned["a", "g"]) == list(range(2, pulled)), "released at once"
    assert broker.times["a", "g"] == {n: int(n < 2) for n in range(pulled)}, "they do not count as delivered"


async def test_endless_handler_is_cancelled(metaserver, broker):
    fill(broker, range(1))
    consumer = consumer_of(metaserver, drain_s=0.1)
    started = handled_by(consumer, asyncio.Event())
    task = asyncio.create_task(consumer.run())
    await until_async(lambda: started.messages)
    await cancelled(task)
    assert broker.returned["a", "g"] == [0]


# Failures.


@pytest.mark.parametrize("is_plain", [False, True], ids=["coroutine", "thread"])
async def test_exceptions_decide_the_message(is_plain):
    handled = []

    def plain(message: qmq.ReceivedMessage) -> None:
        if message["n"] == "0":
            raise qmq.DeadLetter("no such order")
        if message["n"] == "1" and message.times == 1:
            raise qmq.RetryLater(0.01)
        handled.append((message["n"], message.times))

    async def handle(message: qmq.ReceivedMessage) -> None:
        plain(message)

    async with handling(plain if is_plain else handle, 3, retry_delay=1_000) as broker:
        await until_async(lambda: len(handled) == 2)
    assert handled == [("2", 1), ("1", 2)]
    assert broker.dead["a", "g"] == [(0, "no such order")]


async def test_invalid_bytes_become_a_dead_letter(consumer, broker):
    fill(broker, [0])
    good = batch_encoder("a", 1)(qmq.Message("a", {"n": "1"}, id="bad"))
    bad = good[:-3] + b"\0\x09" + good[-1:]  # the value's length is wrong
    broker.add("a", bad)
    fill(broker, [2])
    handled = []

    @consumer.listen("a", group="g", start="earliest", retries_max=2, retry_delay=0.0)
    async def handle(message: qmq.ReceivedMessage) -> None:
        handled.append(message["n"])

    async with consuming(consumer):
        await until_async(lambda: broker.subjects["%DEAD_RETRY%a%g"] == [bad])
    assert handled == ["0", "2"]
    assert all("InvalidMessage" in nack.reason for nack in broker.nacks)


async def test_messages_that_fail_together_travel_in_one_nack():
    async def handle(message: qmq.ReceivedMessage) -> None:
        await asyncio.sleep(0)
        raise ValueError("down")

    async with handling(handle, 100, concurrency=100, retry_delay=1_000) as broker:
        await until_async(lambda: sum(broker.times["a", "g"].values()) == 100)
        await until_async(lambda: not broker.unacked())
    assert len(broker.nacks) < 10


async def test_refused_ack_drops_handled_messages(consumer, broker):
    fill(broker, range(2))
    gate, began = asyncio.Event(), []

    @consumer.listen("a", group="g", start="earliest", concurrency=2, retry_delay=0.0)
    async def handle(message: qmq.ReceivedMessage) -> None:
        began.append((message["n"], message.times))
        if message["n"] == "1" and not gate.is_set():
            await gate.wait()
            raise ValueError("too late")

    broker.ack_error = InvalidAck("not yours")
    async with consuming(consumer):
        await until_async(lambda: broker.ack_error is None and len(subscribes(broker)) == 2)
        gate.set()
        await until_async(lambda: len(began) == 4 and not broker.unacked())
    assert sorted(began) == [("0", 1), ("0", 1), ("1", 1), ("1", 1)], "the broker counts no second delivery"
    assert not broker.nacks


@pytest.mark.parametrize(
    "own, given, is_handled",
    [(None, 3, True), (None, 4, False), (None, 7, False), (5, 5, True), (5, 6, False), (1, 2, False), (1, 4, False)],
)
async def test_vanished_consumers_count_as_deliveries(own, given, is_handled, consumer, broker):
    """No consumer decided it: the next client checks the limit before a handler begins."""
    broker.add("a", encode_message(qmq.Message("a", {"n": "0"}, id="m", retries_max=own), 0))
    broker.earlier = {0: given - 1}
    handled = handled_by(consumer, retries_max=3)
    async with consuming(consumer):
        await until_async(lambda: broker.acks or broker.nacks)
    assert [message.times for message in handled.messages] == ([given] if is_handled else [])
    reasons = [nack.reason for nack in broker.nacks]
    assert reasons == ([] if is_handled else [f"{delivered(given - 1)}, and never acked"])
    assert [reason for _, reason in broker.dead["a", "g"]] == reasons


async def test_slow_message_delays_no_other_key(monkeypatch, consumer, broker):
    """Its decision is sent at once: later messages of the key wait for it."""
    monkeypatch.setattr(group_session, "SWEEP_S", 1_000.0)

    encode = batch_encoder("a", 1)
    for number in range(5):
        broker.add("a", encode(qmq.Message("a", {"n": str(number)}, id=f"m{number}", order_key=f"k{number}")))
    gate = asyncio.Event()

    @consumer.listen("a", group="g", start="earliest", concurrency=5)
    async def handle(message: qmq.ReceivedMessage) -> None:
        if message["n"] == "0":
            await gate.wait()

    async with consuming(consumer):
        await until_async(lambda: broker.acks and broker.unacked() == [0])
        gate.set()


# Messages of other kinds.


async def test_mailbox_messages_show_the_subject(consumer, broker):
    fill(broker, [0])
    fill(broker, [1], subject="%RETRY%a%g")
    handled = handled_by(consumer, start="latest", tags=["x"])
    async with consuming(consumer):
        await until_async(lambda: handled.messages)
    (message,) = handled.messages
    assert (message.subject, message.source, message["n"]) == ("a", "%RETRY%a%g", "1"), "the earliest"
    plain, mailbox = subscribes(broker)[0], subscribes(broker, "%RETRY%a%g")[0]
    assert (plain["start"], plain["tags"], plain["deliveries_max"]) == ("latest", ["x"], 1_000)
    assert (mailbox["start"], mailbox["tags"], mailbox["deliveries_max"]) == ("earliest", [], 1_000)


async def test_broadcast_has_own_group_and_no_mailbox(consumer, broker):
    handled_by(consumer, group=None, tags=["y", "x"], tag_mode="all", start=datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC))
    async with consuming(consumer):
        await until_async(lambda: broker.pulls)
    (fields,) = broker.subscribes
    asked = {name: fields[name] for name in ("group", "broadcast", "tags", "tag_mode", "start", "since_ms")}
    assert asked == {
        "group": "c1",
        "broadcast": True,
        "tags": ["x", "y"],
        "tag_mode": "all",
        "start": "since",
        "since_ms": 7000,
    }


async def test_message_for_another_group_is_acked(consumer, broker):
    for at, group in enumerate(("other", "g", "")):
        encoded = batch_encoder("a", 1)(qmq.Message("a", {"n": str(at)}, id=str(at)))
        broker.add("a", with_properties(encoded, {"qmq_consumerGroupName": group} if group else {}))
    handled = handled_by(consumer)
    async with consuming(consumer):
        await until_async(lambda: len(handled.messages) == 2 and not broker.unacked())
    assert handled.numbers == [1, 2]


# At most once.


async def test_most_once_acks_before_handling():
    unacked = []

    async def handle(message: qmq.ReceivedMessage) -> None:
        unacked.append(message.sequence in broker.unacked())
        raise ValueError("is not tried again")

    async with handling(handle, 20, most_once=True, concurrency=3, retry_delay=0.0) as broker:
        await until_async(lambda: len(unacked) == 20)
    assert not any(unacked)
    assert not broker.nacks
    assert broker.times["a", "g"] == dict.fromkeys(range(20), 1)


async def test_most_once_skips_begun_messages(consumer, broker):
    fill(broker, range(1))
    fill(broker, range(1, 4))
    broker.earlier = {0: 1}
    handled = handled_by(consumer, most_once=True)
    async with consuming(consumer):
        await until_async(lambda: len(handled.messages) == 3)
    assert sorted(handled.numbers) == [1, 2, 3]
    assert not broker.unacked()
    assert broker.returned["a", "g"] == []


async def test_most_once_acks_no_waiting_messages(consumer, broker):
    fill(broker, range(50))
    gate = asyncio.Event()
    began = handled_by(consumer, gate, most_once=True, prefetch_messages=40)
    async with consuming(consumer) as task:
        await until_async(lambda: began.messages and len(broker.unacked()) >= 3)
        consumer.stop()
        gate.set()
        await task
    assert began.numbers == [0]
    left = sorted(broker.returned["a", "g"])
    assert left + list(range(broker.positions["a", "g"], 50)) == list(range(1, 50))
    assert {broker.times["a", "g"][sequence] for sequence in left} == {0}, "the next one does not skip them"


async def test_most_once_refused_ack_is_not_handled(consumer, broker):
    fill(broker, range(1))
    broker.ack_error = InvalidAck("not yours")
    handled = handled_by(consumer, most_once=True)
    async with consuming(consumer):
        await until_async(lambda: len(broker.acks) == 1)  # of the redelivered message
    assert handled.messages == []


async def test_refused_dead_letter_does_not_block_others(consumer, broker):
    broker.stores_dead_letters = False
    fill(broker, [0])
    handled = []

    @consumer.listen("a", group="g", start="earliest", retry_delay=0.0)
    async def handle(message: qmq.ReceivedMessage) -> None:
        if message["n"] == "0":
            raise qmq.DeadLetter("no such order")
        if message["n"] == "1" and message.times == 1:
            raise ValueError("not now")
        handled.append(int(message["n"]))

    async with consuming(consumer):
        await until_async(lambda: len(subscribes(broker)) == 1)
        await until_async(lambda: broker.refused > 1)
        for number in range(1, 20):
            fill(broker, [number])
            await until_async(lambda: number == 1 or number in handled)  # noqa: B023
        await until_async(lambda: sorted(handled) == list(range(1, 20)))
        assert len(subscribes(broker)) == 1, "the subscription goes on"
        broker.stores_dead_letters = True
        await until_async(lambda: broker.dead["a", "g"] == [(0, "no such order")])


async def test_exception_with_failing_repr_decides():
    class Broken(qmq.DeadLetter):
        def __str__(self) -> str:
            raise ValueError("no text")

    times = []

    async def handle(message: qmq.ReceivedMessage) -> None:
        times.append(message.times)
        if message.times == 1:
            raise Broken

    async with handling(handle, retry_delay=0.0):
        await until_async(lambda: times == [1, 2])


class Panic(BaseException):
    """Raised by extensions in other languages."""


THREAD_ENDS = [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), StopIteration()]
COROUTINE_ENDS = [Panic(), GeneratorExit()]
ENDS = [*((True, raised) for raised in THREAD_ENDS), *((False, raised) for raised in COROUTINE_ENDS)]


@pytest.mark.parametrize("is_plain, raised", ENDS)
async def test_base_exception_fails_one_message(is_plain, raised):
    handled = []

    def plain(message: qmq.ReceivedMessage) -> None:
        if message["n"] == "1" and message.times == 1:
            raise raised
        handled.append(int(message["n"]))

    async def handle(message: qmq.ReceivedMessage) -> None:
        plain(message)

    async with handling(plain if is_plain else handle, 3, retry_delay=0.0) as broker:
        await until_async(lambda: sorted(handled) == [0, 1, 2])
    assert repr(raised) in broker.nacks[0].reason


@pytest.mark.parametrize("rest_s", [0.01, 3600])
async def test_worker_without_thread_retries(monkeypatch, rest_s):
    """Regression: without new threads in a container, workers failed and restarted in a busy loop."""
    attempts: list[str] = []

    def no_thread(name: str) -> None:
        attempts.append(name)
        if rest_s > 1 or len(attempts) < 3:
            raise RuntimeError("can't start new thread")
        return made(name)

    made = handler.HandlerThread
    monkeypatch.setattr(handler, "HandlerThread", no_thread)
    monkeypatch.setattr(listener, "WORKER_REST_S", rest_s)

    handled = []

    def handle(message: qmq.ReceivedMessage) -> None:
        handled.append(int(message["n"]))

    async with handling(handle, 3):
        if rest_s > 1:
            await until_async(lambda: attempts)
            await settle()
            assert len(attempts) == 1
        else:
            await until_async(lambda: len(handled) == 3)


# Decisions of the application.


async def test_without_auto_ack_the_application_decides():
    taken = []

    async def handle(message: qmq.ReceivedMessage) -> None:
        taken.append(message)
        if message["n"] == "5":
            raise ValueError("an exception nacks")

    async with handling(handle, 6, auto_ack=False, retry_delay=1_000) as broker:
        await until_async(lambda: len(taken) == 6)
        await until_async(lambda: len(broker.unacked()) == 5)
        await taken[0].ack()
        await taken[0].nack("too late")
        await taken[1].nack("later", delay=1_000)
        await taken[2].dead_letter("never")
        await asyncio.to_thread(taken[3].ack_nowait)  # from another thread
        await until_async(lambda: broker.unacked() == [4])
        assert broker.dead["a", "g"] == [(2, "never")]
        reasons = {nack.reason for nack in broker.nacks}
        assert reasons == {"later", "never", "ValueError('an exception nacks')"}
        await taken[4].ack()


async def test_stop_waits_for_decisions(consumer, broker):
    fill(broker, range(2))
    taken = handled_by(consumer, auto_ack=False).messages
    async with consuming(consumer) as task:
        await until_async(lambda: len(taken) == 2)
        consumer.stop()
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
        await taken[1].ack()
        await taken[0].nack("not done", delay=1_000)
        await task
    assert broker.times["a", "g"] == {0: 1, 1: 1}
    assert [nack.reason for nack in broker.nacks] == ["not done"]
    assert broker.returned["a", "g"] == [0], "it waits for its retry"


async def test_exception_after_decision_is_only_logged(caplog):
    async def handle(message: qmq.ReceivedMessage) -> None:
        await message.ack()
        raise ValueError("afterwards")

    async with handling(handle, 1) as broker:
        await until_async(lambda: "afterwards" in caplog.text)
    assert not broker.nacks and broker.acks


# While it runs.


async def test_concurrency_changes_while_handlers_run(consumer, broker):
    fill(broker, range(1_000))
    running, gate = set(), asyncio.Semaphore(0)

    @consumer.listen("a", group="g", start="earliest", concurrency=2)
    async def handle(message: qmq.ReceivedMessage) -> None:
        running.add(message.sequence)
        await gate.acquire()
        running.discard(message.sequence)

    listener = consumer.listeners["a", "g"]
    async with consuming(consumer):
        await until_async(lambda: len(running) == 2)
        listener.concurrency = 7
        await until_async(lambda: len(running) == 7)
        listener.concurrency = 3
        for _ in range(6):  # surplus workers end at once, two go on
            gate.release()
        await until_async(lambda: gate.locked() and len(running) == 3 and len(listener._workers) == 3)
        listener.concurrency = 4
        await until_async(lambda: len(running) == 4)
        for _ in range(2_000):
            gate.release()
    assert max(broker.times["a", "g"].values()) == 1


@pytest.mark.parametrize("how", ["stop and resume", "offline and online"])
async def test_a_listener_leaves_its_group_and_comes_back(how, consumer, broker):
    fill(broker, range(100))
    gate = asyncio.Event()
    handled = handled_by(consumer, gate)
    listener = consumer.listeners["a", "g"]
    away, back = (listener.stop, listener.resume) if how == "stop and resume" else (consumer.offline, consumer.online)
    async with consuming(consumer):
        await until_async(lambda: handled.messages)
        away()
        gate.set()
        await until_async(lambda: broker.unsubscribes == 2)  # the mailbox, too
        assert handled.numbers == [0]
        pulled = broker.positions["a", "g"]
        assert pulled > 1 and sorted(broker.returned["a", "g"]) == list(range(1, pulled))
        assert broker.times["a", "g"] == {n: int(n < 1) for n in range(pulled)}
        back()
        await until_async(lambda: len(handled.messages) == 100)
    assert sorted(handled.numbers) == [*range(100)]


async def test_resume_before_cancelled_handler_ends(monkeypatch, metaserver, broker):
    monkeypatch.setattr("qmq.client.listener.CANCEL_S", 0.0)

    fill(broker, range(10))
    consumer, begun, handled = consumer_of(metaserver, consumer_id="c1", drain_s=0.0), asyncio.Event(), []
    tidied = asyncio.Event()

    @consumer.listen("a", group="g", start="earliest")
    async def handle(message: qmq.ReceivedMessage) -> None:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await tidied.wait()
        handled.append(int(message["n"]))

    listener = consumer.listeners["a", "g"]
    async with consuming(consumer):
        await begun.wait()
        listener.stop()
        await until_async(lambda: broker.unsubscribes == 2)
        listener.resume()
        await until_async(lambda: sorted(handled) == list(range(10)))
        tidied.set()


@pytest.mark.parametrize("how", ["stop", "offline"])
async def test_short_stop_rejoins(how, consumer, broker):
    """Regression: within one turn of the loop the old subscription had ended and no new one was made."""
    handled = handled_by(consumer)
    fill(broker, range(3))
    async with consuming(consumer):
        await until_async(lambda: len(handled.messages) == 3)
        if how == "stop":
            consumer.listeners["a", "g"].stop()
            consumer.listeners["a", "g"].resume()
        else:
            consumer.offline()
            consumer.online()
        fill(broker, range(3, 6))
        await until_async(lambda: handled.numbers == [*range(6)])


async def test_offline_consumer_waits(metaserver, broker):
    fill(broker, range(1))
    consumer = consumer_of(metaserver, online=False)
    handled = handled_by(consumer)
    async with consuming(consumer):
        await settle()
        assert not broker.subscribes
        consumer.online()
        await until_async(lambda: handled.messages)


async def test_added_listener_starts(consumer, broker):
    fill(broker, range(1))
    fill(broker, range(1), subject="b")
    first, added = handled_by(consumer), Handled()
    async with consuming(consumer):
        await until_async(lambda: first.messages)
        consumer.listen("b", group="g", start="earliest")(added.handle)
        await until_async(lambda: added.messages)


async def test_consumer_runs_again_after_its_end(consumer, broker):
    handled = handled_by(consumer)
    for n in range(2):
        fill(broker, [n])
        async with consuming(consumer):
            await until_async(lambda: len(handled.messages) == n + 1)  # noqa: B023
            with pytest.raises(qmq.InvalidRequest, match="runs"):
                await consumer.run()


# Signals.


def test_consumer_in_a_thread_is_stopped():
    running = []

    async def test() -> None:
        async with cluster("g1") as (metaserver, [broker]):
            fill(broker, range(3))
            consumer = consumer_of(metaserver)
            running.append((consumer, handled_by(consumer)))
            await consumer.run()
            assert not broker.returned["a", "g"] and broker.acks

    with ThreadPoolExecutor() as pool:
        future = pool.submit(asyncio.run, test())
        until(lambda: future.done() or (running and len(running[0][1].messages) == 3))
        running[0][0].stop()
        future.result(timeout=60)


async def test_sigterm_ends_all_consumers(metaserver, broker):
    tasks = []
    for _ in range(2):
        consumer = consumer_of(metaserver)
        handled_by(consumer)
        tasks.append(asyncio.create_task(consumer.run()))
    await until_async(lambda: len(subscribes(broker)) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.gather(*tasks)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_application_keeps_its_sigterm_handler(metaserver, broker):
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        consumer = consumer_of(metaserver)
        handled_by(consumer)
        async with consuming(consumer) as task:
            await until_async(lambda: broker.pulls)
            os.kill(os.getpid(), signal.SIGTERM)
            await until_async(lambda: signals)
            assert not task.done()
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_exclusive_consumer_sends_its_start(consumer, broker):
    fill(broker, range(1))
    begin_ms = time.time_ns() // 1_000_000
    handled = handled_by(consumer, exclusive=True)
    async with consuming(consumer):
        await until_async(lambda: handled.messages)
    assert begin_ms <= subscribes(broker)[0]["exclusive_ms"] <= time.time_ns() // 1_000_000
    with pytest.raises(qmq.InvalidRequest, match="exclusive"):
        consumer.listen("b", broadcast=True, exclusive=True)


@pytest.mark.parametrize("batch", [None, 5], ids=["single", "in lists"])
async def test_self_cancelling_handler_fails_its_message(batch):
    """Libraries cancel the current task to limit a wait. Regression: the worker ended and its message stayed."""

    handled, attempts = [], []

    async def handle(given: qmq.ReceivedMessage | list[qmq.ReceivedMessage]) -> None:
        messages = given if isinstance(given, list) else [given]
        if len(attempts) < 2:
            attempts.append(messages)
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        handled.extend(int(message["n"]) for message in messages)

    async with handling(handle, 3, retry_delay=0.01, batch=batch) as broker:
        await until_async(lambda: sorted(handled) == [0, 1, 2])
        await until_async(lambda: not broker.unacked())
    assert {nack.reason for nack in broker.nacks} == {"CancelledError()"}


@pytest.mark.parametrize("batch", [None, 1], ids=["single", "in lists"])
async def test_self_cancelling_return_fails_no_other(batch):
    """Regression: the cancellation was raised in the next message's handler."""

    handled = []

    async def handle(given: qmq.ReceivedMessage | list[qmq.ReceivedMessage]) -> None:
        (message,) = given if isinstance(given, list) else [given]
        if message["n"] == "0":
            asyncio.current_task().cancel()
        else:
            await asyncio.sleep(0)
        handled.append((int(message["n"]), message.times))

    async with handling(handle, 3, retry_delay=0.0, batch=batch) as broker:
        await until_async(lambda: len(handled) == 3)
        await until_async(lambda: not broker.unacked())
    assert handled == [(0, 1), (1, 1), (2, 1)] and not broker.nacks
