"""Core, Shell. Prefetch of a listener: its size, and slow handlers' excess messages, which go back uncounted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import qmq
from qmq.client import listener as listener_module
from qmq.client import prefetch
from qmq.client.group_session import GroupSession
from qmq.client.prefetch import AHEAD_S, BEFORE_KNOWN_MIN, LOOK_S, PACE_S, Pace, Pacer, Prefetch
from qmq.remoting.commands import Command, NackEntry, Verdict
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import (
    Handled,
    LocalBroker,
    LocalMetaserver,
    cancelled,
    cluster,
    consumer_of,
    fill,
    handled_by,
    ns,
)

MESSAGES, FAST = 300, 1


@pytest.mark.parametrize(
    "handler_s, concurrency, messages_max, wanted",
    [
        pytest.param(None, 1, 1000, BEFORE_KNOWN_MIN, id="nothing known"),
        pytest.param(None, 64, 1000, 128, id="nothing known, many handlers"),
        pytest.param(None, 1, 2, 2, id="nothing known, a small bound"),
        pytest.param(0.0, 1, 1000, 1000, id="too short to measure"),
        pytest.param(5e-6, 1, 1000, 1000, id="fast"),
        pytest.param(0.001, 1, 1000, 500, id="a millisecond"),
        pytest.param(0.2, 1, 1000, 3, id="slow"),
        pytest.param(0.2, 8, 1000, 20, id="slow, eight at once"),
        pytest.param(60.0, 1, 1000, 1, id="very slow"),
        pytest.param(60.0, 8, 1000, 8, id="very slow: one waits for each handler"),
        pytest.param(60.0, 8, 5, 5, id="never more than the application allows"),
    ],
)
def test_prefetch_is_half_a_second_of_work(handler_s, concurrency, messages_max, wanted):
    prefetch = Prefetch(messages_max, concurrency)
    if handler_s is not None:
        prefetch.record_call(handler_s)
    assert prefetch.messages == wanted


def test_slow_handler_is_noticed_soon():
    prefetch = Prefetch(1000, 1)
    prefetch.record_call(1e-5)
    assert prefetch.messages == 1000
    for _ in range(4):
        prefetch.record_call(0.2)
    assert prefetch.messages <= 2 * AHEAD_S / 0.2


def test_more_handlers_at_once_ask_for_more():
    prefetch = Prefetch(1000, 1)
    prefetch.record_call(0.25)
    prefetch.set_concurrency(10)
    assert prefetch.messages == 20


async def test_slow_backlog_stays_shared(metaserver, broker):
    """Regression: with a prefetch of 1,000, the first consumer took all 100 messages of 0.2 s each."""
    fill(broker, range(100))
    first, second, ended = consumer_of(metaserver), consumer_of(metaserver), asyncio.Event()
    slow, fast = handled_by(first, ended), handled_by(second)
    async with consuming(first):
        await until_async(lambda: slow.messages)
        async with consuming(second):
            await until_async(lambda: len(fast.messages) >= 90)
        ended.set()


# Pace of slow handlers.


@pytest.mark.parametrize(
    "arrived, taken, pace",
    [
        pytest.param([300] * 7, [10, 20, 30, 40, 50, 60, 70], Pace(60, 1.5), id="they had work all the time"),
        pytest.param([300] * 7, [10] * 7, Pace(0, 1.5), id="none was taken"),
        pytest.param([300] * 6, [10] * 6, None, id="too early"),
        pytest.param([300] * 9, [0, 100, 200, 200, 200, 200, 205, 206, 207], Pace(7, 1.5), id="of late alone"),
        pytest.param([100 * n for n in range(1, 8)], [90 * n for n in range(7)], None, id="the next one came since"),
        pytest.param([10] * 6 + [30], [0] + [10] * 6, None, id="a pause without messages"),
    ],
)
def test_pace_counts_messages_under_load(arrived, taken, pace):
    pacer = Pacer()
    looks = [
        pacer.pace(number * LOOK_S, arrived=arrived_now, taken=taken_now)
        for number, (arrived_now, taken_now) in enumerate(zip(arrived, taken, strict=True))
    ]
    assert looks[-1] == pace and looks[:6] == [None] * 6


@pytest.mark.parametrize("pause_s", [0.0, 0.5, 0.9])
def test_pausing_fast_handlers_keep_messages(pause_s):
    """A thousand messages, taken at 2,000 a second, with a pause in between."""
    pacer, looks = Pacer(), round((pause_s + 10) / LOOK_S)
    for look in range(looks):
        now_s = look * LOOK_S
        taken = int(2_000 * (min(now_s, 3.1) + max(0.0, now_s - 3.1 - pause_s)))
        found = pacer.pace(now_s, arrived=taken + 1_000, taken=taken)
        assert found is None or not found.is_too_slow_for(1_000)


@pytest.mark.parametrize(
    "pace, waiting, is_too_slow",
    [
        pytest.param(Pace(150, 1.5), 150, False, id="as long as it may"),
        pytest.param(Pace(150, 1.5), 151, True, id="longer"),
        pytest.param(Pace(0, 1.5), 1, True, id="nothing was taken"),
    ],
)
def test_slow_pace_is_recognised(pace, waiting, is_too_slow):
    assert pace.is_too_slow_for(waiting) == is_too_slow


def test_pace_only_lowers_the_prefetch():
    asked = Prefetch(1_000, 4)
    asked.record_call(1e-5)
    asked.record_pace(Pace(20_000, PACE_S))
    assert asked.messages == 1_000
    asked.record_pace(Pace(56, PACE_S))
    assert asked.messages == 20, "half a second of work, at 10 messages a second each"
    asked.record_pace(Pace(20_000, PACE_S))
    assert asked.messages == 20, "what calls take says when it is more"
    asked.record_pace(Pace(0, PACE_S))
    assert asked.messages == 4


def test_pace_bounds_unfinished_calls():
    asked = Prefetch(1_000, 2)
    asked.record_pace(Pace(0, PACE_S))
    assert asked.messages == 2


@pytest.fixture
def hurried(monkeypatch):
    """Seconds shortened to a tenth."""
    for name in ("AHEAD_S", "PACE_S", "WAITS_S_MAX"):
        monkeypatch.setattr(prefetch, name, getattr(prefetch, name) / 10)
    monkeypatch.setattr(listener_module, "LOOK_S", LOOK_S / 10)
    measured = Prefetch.record_call
    monkeypatch.setattr(Prefetch, "record_call", lambda self, _: measured(self, 1e-6))  # however busy the machine is


class Slow:
    """First consumer: its handlers take up to `FAST` messages at once, and then none before `gate` is set."""

    def __init__(self, metaserver: LocalMetaserver, **options: object) -> None:
        self.client = consumer_of(metaserver, consumer_id="slow")
        self.gate = asyncio.Event()
        self.began: list[int] = []
        self.done: list[int] = []
        is_batch = "batch" in options

        @self.client.listen("a", start="earliest", **({"group": "g", "prefetch_messages": 1_000} | options))
        async def handle(given: qmq.ReceivedMessage | list[qmq.ReceivedMessage]) -> None:
            messages = given if isinstance(given, list) else [given]
            assert is_batch == isinstance(given, list)
            self.began += ns(messages)
            if len(self.began) > FAST:
                await self.gate.wait()
            self.done += ns(messages)

    @property
    def waiting(self) -> int:
        subscription = self.client._connections._subscriptions[0]
        return subscription.waiting_messages

    async def run(self, broker: LocalBroker) -> None:
        """Run until its fast calls have ended."""
        self.task = asyncio.create_task(self.client.run())
        fill(broker, range(FAST))
        await until_async(lambda: len(self.done) == FAST)

    async def begin(self, broker: LocalBroker, messages: int = MESSAGES, *, delivered: int = MESSAGES) -> None:
        """Run until its handlers are slow and this many messages were delivered to it or returned."""
        await self.run(broker)
        fill(broker, range(FAST, messages), apart=bool(broker.suspected))
        await until_async(
            lambda: len(self.began) > FAST and (released(broker) or delivered_of(broker) >= min(delivered, messages))
        )

    async def finish(self, messages: int = MESSAGES, other: Handled | None = None) -> None:
        """Let its calls end; leave when it, with the other consumer, has handled these messages."""
        self.gate.set()
        await until_async(lambda: len(self.done) + (len(other.messages) if other else 0) == messages)
        await cancelled(self.task)


def delivered_of(broker: LocalBroker) -> int:
    return sum(group.position for group in broker.copies.log.state.groups.values())


def released(broker: LocalBroker) -> list[NackEntry]:
    return [entry for nack in list(broker.nacks) for entry in nack.entries if entry.verdict == Verdict.NOT_BEGUN]


def joining(metaserver: LocalMetaserver) -> tuple[qmq.Consumer, Handled]:
    """Return a second consumer, and its received messages."""
    client = consumer_of(metaserver)
    return client, handled_by(client)


@pytest.mark.parametrize(
    "options, kept",
    [
        pytest.param({}, 1, id="one at a time"),
        pytest.param({"concurrency": 8}, 8, id="eight at once"),
        pytest.param({"batch": 12}, 12, id="in lists"),
        pytest.param({"most_once": True}, 1, id="at most once"),
    ],
)
async def test_slow_listener_returns_excess_uncounted(hurried, options, kept, metaserver, broker):
    """Regression: a second consumer got nothing while the first had any of its thousand messages."""
    first, (second, done) = Slow(metaserver, **options), joining(metaserver)
    await first.begin(broker)
    await until_async(lambda: released(broker) and first.waiting <= kept)
    still = first.waiting
    async with consuming(second):
        await until_async(lambda: len(done.messages) == MESSAGES - len(first.began) - still)
    await first.finish(other=done)
    assert sorted(first.done + done.numbers) == list(range(MESSAGES))
    assert {message.times for message in done.messages} == {1} and set(broker.times["a", "g"].values()) == {1}
    assert still == kept


async def test_pace_is_measured_after_a_pause(hurried, metaserver, broker):
    first = Slow(metaserver)
    await first.run(broker)
    await _many_looks()
    fill(broker, range(FAST, MESSAGES))
    await until_async(lambda: released(broker))
    await first.finish()


async def test_single_consumer_returns_little(hurried, metaserver, broker):
    """Pulls in flight ask for as much as fast handlers had."""
    first = Slow(metaserver)
    await first.begin(broker)
    await until_async(lambda: first.waiting == 1)
    await _many_looks()
    assert sum(entry.end - entry.begin for entry in released(broker)) <= MESSAGES + 4 * 250
    assert len([pull for pull in broker.pulls if pull.messages_max > 1]) <= 8, "it asks for no more of them"
    await first.finish()
    assert first.done == list(range(MESSAGES)), "one at a time, in order"


async def test_new_messages_follow_returned_ones(hurried, metaserver, broker):
    """A pull in flight brings newer messages before the broker has the returned ones."""
    first = Slow(metaserver)
    broker.holds.add(Command.NACK)
    beginning = asyncio.create_task(first.begin(broker))
    await until_async(lambda: broker.held)
    fill(broker, range(MESSAGES, MESSAGES + 10))
    await asyncio.sleep(0.02)
    broker.release()
    await beginning
    await until_async(lambda: any(entry.end - entry.begin > 200 for entry in released(broker)))
    assert len(released(broker)) > 1 and first.waiting == 1
    await first.finish(MESSAGES + 10)
    assert first.done == list(range(MESSAGES + 10))


async def test_returned_messages_are_pulled_first(hurried, monkeypatch, metaserver, broker):
    """A handler that goes on at that moment causes the next pull; returned messages must be sent first."""
    first, sent, ask = Slow(metaserver, prefetch_messages=100), [], GroupSession._ask
    send_released = GroupSession.released

    def asked(session: GroupSession, command: Command, *rest: Any) -> None:
        if first.gate.is_set() and command in (Command.NACK, Command.PULL):
            sent.append(command)
        ask(session, command, *rest)

    def went_back(session: GroupSession) -> None:
        first.gate.set()
        send_released(session)

    monkeypatch.setattr(GroupSession, "_ask", asked)
    monkeypatch.setattr(GroupSession, "released", went_back)
    await first.begin(broker, delivered=FAST + 100)
    await first.gate.wait()
    await first.finish()
    assert sent[0] is Command.NACK and first.done == list(range(MESSAGES))


async def test_double_prefetch_stays(hurried, metaserver, broker):
    """Otherwise handlers of varying speed would have messages come and go."""
    first = Slow(metaserver)
    await first.begin(broker, FAST + 3)
    await _many_looks(lambda: bool(broker.nacks))
    assert not broker.nacks and first.waiting == 2
    await first.finish(FAST + 3)


async def _many_looks(is_over: Callable[[], bool] = lambda: False) -> None:
    """Let excess messages be released."""
    end_s = asyncio.get_running_loop().time() + 5 * prefetch.PACE_S
    while asyncio.get_running_loop().time() < end_s and not is_over():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "begins, options",
    [
        pytest.param(False, {}, id="an older broker would count it"),
        pytest.param(True, {"group": None}, id="a broadcast has nobody to share with"),
        pytest.param(True, {"exclusive": True}, id="nor has one that has all of the group"),
    ],
)
async def test_unshared_listener_keeps_messages(hurried, begins, options, metaserver, broker):
    broker.is_old = not begins
    first = Slow(metaserver, **options)
    await first.begin(broker)
    await _many_looks(lambda: bool(broker.nacks))
    assert not broker.nacks and first.waiting == MESSAGES - FAST - 1
    await first.finish()


async def test_messages_behind_suspected_are_returned(hurried, metaserver, broker):
    """It is handled alone, so all others wait for it."""
    broker.suspected = {*range(FAST, 40)}
    first, (second, done) = Slow(metaserver, concurrency=4), joining(metaserver)
    await first.begin(broker)
    assert first.began[-1] == FAST
    async with consuming(second):
        await until_async(lambda: len(done.messages) >= MESSAGES - FAST - 2 * 4 - 1)
        await first.finish(other=done)
    assert sorted(first.done + done.numbers) == list(range(MESSAGES))
    assert set(broker.times["a", "g"].values()) == {1}
    assert sorted(broker.begun) == list(range(FAST, 40)), "where it is handled, and only there"


async def test_leaving_returns_each_message_once(hurried, metaserver, broker):
    first, (second, done) = Slow(metaserver, concurrency=2), joining(metaserver)
    await first.begin(broker)
    await until_async(lambda: released(broker))
    first.client.stop()
    async with consuming(second):
        await until_async(lambda: len(done.messages) == MESSAGES - len(first.began))
        first.gate.set()
        await first.task
    assert sorted(first.done + done.numbers) == list(range(MESSAGES))
    assert set(broker.times["a", "g"].values()) == {1}


async def test_each_source_keeps_its_oldest(hurried):
    async with cluster("g1", "g2") as (metaserver, brokers):
        first, (second, done) = Slow(metaserver), joining(metaserver)
        await first.run(brokers[0])
        fill(brokers[0], range(FAST, MESSAGES))
        fill(brokers[1], range(MESSAGES))
        for broker in brokers:
            fill(broker, range(1_000, 1_100), "%RETRY%a%g")
        await until_async(lambda: all(map(released, brokers)) and first.waiting <= 4)
        async with consuming(second):
            await until_async(lambda: len(done.messages) >= 2 * (MESSAGES + 100) - len(first.began) - 4)
        await first.finish(2 * (MESSAGES + 100), done)
        assert {message.times for message in done.messages} == {1}


async def test_key_order_survives_returned_messages(hurried, metaserver, broker):
    """Each key has two messages; the second one comes when the first one is settled."""
    keys, done = 150, []

    for n in range(2 * keys):
        fill(broker, [n], order_key=f"k{n % keys}")
    first, second = consumer_of(metaserver), consumer_of(metaserver)
    gate, is_slow = asyncio.Event(), asyncio.Event()

    @first.listen("a", group="g", start="earliest", prefetch_messages=1_000)
    async def slow(message: qmq.ReceivedMessage) -> None:
        if len(done) >= FAST:
            is_slow.set()
            await gate.wait()
        done.append(int(message["n"]))

    @second.listen("a", group="g", start="earliest")
    async def fast(message: qmq.ReceivedMessage) -> None:
        done.append(int(message["n"]))

    async with consuming(first):
        await is_slow.wait()
        await until_async(lambda: released(broker))
        async with consuming(second):
            await until_async(lambda: len(done) >= keys)
            gate.set()
            await until_async(lambda: len(done) == 2 * keys)
    assert sorted(done) == list(range(2 * keys))
    assert all(done.index(n) < done.index(n + keys) for n in range(keys))
