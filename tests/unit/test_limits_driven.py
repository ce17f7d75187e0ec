"""Shell. Each limit that stops or slows a client is exceeded once, and shows the name in tests/unit/test_limits.py: in
`Lag`, Doctor, a metric or an error.

Rows of operators, brokers, delay servers and watchdogs read the value on the page of metrics that a process would make
of its core (tests/support/pages.py), and some Doctor's finding about it. Those of consumers read the core's causes for
such a page. Limits of the process, and not its core, are exceeded on processes (`ON_PROCESSES`). Rows marked `Nobody`
are not driven, as they stop no client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import pytest

import qmq
from qmq.broker.group_status import Cause
from qmq.client.batch import Unknown
from qmq.errors import BrokerReadOnly, ErrorCode, Overloaded, QueueFull
from qmq.metaserver.routes.quotas import Bounds, Quotas
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.rations import NewProducers, NewSubjects, SentBytes, TokenGroups, TokenRation
from qmq.remoting.packet import PacketReader
from qmq.replication.readonly import Reason
from qmq.rights import Caller, TokenRole
from qmq.server.overload import LimitsReached
from qmq.testing import Broker as BrokerInMemory
from qmq.tools.findings import judge_limits
from qmq.types import Role
from qmq.watchdog.database import Stats
from tests.integration.test_connections import REACHES
from tests.integration.test_overload import READONLY
from tests.support.pages import broker_page, delay_page, samples, value, watchdog_page
from tests.support.waiting import until_async
from tests.unit.broker import limited, test_retention
from tests.unit.broker.world import Broker, Client, FakeLink, Group
from tests.unit.client.test_producer import producer_of
from tests.unit.client.world import LocalBroker, cluster
from tests.unit.delayserver.world import HOUR_MS, a_group
from tests.unit.server.test_tokens import limits, produce
from tests.unit.test_limits import BROKER, CONSUMER, DELAY, METASERVER, OPERATOR, PRODUCER, REACHED, WATCHDOG, Nobody
from tests.unit.watchdog.test_drain_plan import Drain, row

Seen = Iterable[object]
KEY = ("s", "g")
ANYBODY = Caller("app", TokenRole.CLIENT)
TABLES = {
    "operator": OPERATOR,
    "broker": BROKER,
    "delay": DELAY,
    "metaserver": METASERVER,
    "watchdog": WATCHDOG,
    "consumer": CONSUMER,
    "producer": PRODUCER,
}
DRIVES: dict[tuple[str, str], Callable[[], Seen]] = {}
ON_PROCESSES = REACHES.keys() | READONLY.keys()
"""Exceeded on a real broker by tests/integration/test_connections.py, which checks metrics, log and Doctor, and
test_overload.py, which fills memory, exhausts the disk, and reads the reasons.
"""
OF_ITS_OWN = {"token_bytes_per_s"}
"""Broker limits without delay servers: a new due time rewrites the message."""


def drives(process: str, *settings: str) -> Callable[[Callable[[], Seen]], Callable[[], Seen]]:
    """Mark a function that exceeds the limit and returns the visible names."""

    def note(drive: Callable[[], Seen]) -> Callable[[], Seen]:
        DRIVES.update({(process, setting): drive for setting in settings})
        return drive

    return note


def rows() -> list[tuple[str, str]]:
    found = {(name, setting) for name, table in TABLES.items() for setting in table}
    same = {
        ("delay", setting) for setting in BROKER.keys() & DELAY.keys() - OF_ITS_OWN
    }  # same code, driven in a broker
    elsewhere = {("broker", setting) for setting in ON_PROCESSES}
    return sorted(row for row in found - same - elsewhere if not isinstance(TABLES[row[0]][row[1]], Nobody))


@pytest.mark.parametrize(("process", "setting"), rows())
def test_driven_limit_shows_its_name(process, setting):
    drive = DRIVES.get((process, setting))
    assert drive is not None, "a limit that stops somebody has a row here"
    seen, named = list(drive()), TABLES[process][setting]
    if isinstance(named, Cause | Reason):
        assert named in seen
    elif named is REACHED:
        assert seen == [setting]
    else:
        assert seen and [name for name in seen if str(name) not in f"{named} ({setting})"] == []


def test_each_row_is_an_existing_limit():
    assert set(DRIVES) == set(rows())


# Brokers, and their limits in delay servers.


def a_broker_group(*ids: str, **settings) -> tuple[Group, Client]:
    """A group of two brokers with a consumer, and messages it has not requested."""
    group = Group.made(**settings).start()
    client = group.subscribed("c")
    if ids:
        client.produce(*ids)
        group.settle()
    return group, client


@drives("broker", "message_bytes_max")
def a_message_is_too_large() -> Seen:
    group, client = a_broker_group(message_bytes_max=1024)
    asked = client.produce("m", size=2_000)
    group.settle()
    [(_, why)] = client.receipt(asked).refused
    name = "qmq_broker_refused_messages_total"
    return [name] if value(broker_page(group.a), name) == 1 and "(message_bytes_max)" in why else [why]


class NotingLink(FakeLink):
    """Reports reached limits, as an accepted connection does."""

    def __init__(self, peer):
        super().__init__(peer)
        self.reached = LimitsReached()

    def refuse(self, request, error):
        if error.limit:
            self.reached.reached(error.limit, 0, error.limited_subject)
        super().refuse(request, error)


def shown_reached(page: str, prefix: str = "qmq_broker") -> list[str]:
    """Return the settings that a page of metrics counts, and Doctor reports."""
    named = "".join(limit.found for limit in judge_limits("a:1", page))
    counts = samples(page, f"{prefix}_limits_reached_total")
    return [labels["setting"] for labels, count in counts if count > 0 and labels["setting"] in named]


@drives("broker", "new_subjects_max")
def too_many_subjects_in_all() -> Seen:
    allowed = limits(in_all=2)
    with pytest.raises(Overloaded) as caught:
        for number in range(10):
            allowed.check(produce(f"s{number}"), {}, now_ms=0)
    return [caught.value.limit]


@drives("broker", "token_groups_max")
def too_many_groups() -> Seen:
    """Each stays in the log and in memory for good."""
    group, client = a_broker_group()
    client.link = link = NotingLink("c")
    link.ration = TokenRation(ANYBODY, TokenGroups(100, 2), None, lambda: 0)
    for number in range(10):
        client.subscribe(group=f"g{number}")
        group.settle()
    assert len(group.a.log.state.groups) == 1 + 2
    return shown_reached(broker_page(group.a, link.reached))


@drives("broker", "token_subscriptions_max")
def too_many_subscriptions() -> Seen:
    group, client = a_broker_group()
    client.link = link = NotingLink("c")
    link.ration = TokenRation(ANYBODY, TokenGroups(100, 100), None, lambda: 0, subscriptions_max=2)
    for number in range(10):
        client.subscribe(group=f"g{number}")
        group.settle()
    return shown_reached(broker_page(group.a, link.reached))


@drives("broker", "new_producers_per_minute")
def too_many_producers() -> Seen:
    group, client = a_broker_group()
    client.link = link = NotingLink("c")
    link.ration = TokenRation(ANYBODY, TokenGroups(1, 1), None, lambda: 0, producers=NewProducers(2))
    for number in range(1, 11):
        client.produce("m", producer=number)
        group.settle()
    assert len(group.a.log.state.producers) == 2
    return shown_reached(broker_page(group.a, link.reached))


@drives("broker", "window_bytes")
def too_much_without_an_answer() -> Seen:
    window = 2 * PacketReader.STAGING_BYTES
    group, client = a_broker_group(window_bytes=window, message_bytes_max=window)
    client.link = link = NotingLink("c")
    while not link.reached.counts:
        client.produce("m", size=30_000)
    return shown_reached(broker_page(group.a, link.reached))


def shown_causes(broker: Broker) -> list[Cause]:
    """Return a group's causes on the page of metrics after the next check."""
    broker.node.tick()
    found = samples(broker_page(broker), "qmq_broker_group_cause")
    return [Cause(labels["cause"]) for labels, _ in found if (labels["subject"], labels["consumer_group"]) == KEY]


def slave_lags(**settings) -> Seen:
    group, client = a_broker_group(**settings)
    client.produce("m")
    group.a.host.settle()
    for _ in range(2):
        group.a.wait(60)
    reasons = samples(broker_page(group.a), "qmq_broker_readonly")
    return [Reason(labels["reason"]) for labels, is_one in reasons if is_one]


@drives("broker", "slave_lag_ms_max")
def a_slave_is_slow() -> Seen:
    return slave_lags(slave_lag_ms_max=50)


@drives("broker", "slave_lag_bytes_max")
def a_slave_is_far_behind() -> Seen:
    return slave_lags(slave_lag_bytes_max=100)


@drives("broker", "slave_wait_ms")
def a_master_waits_for_its_slave() -> Seen:
    group, _ = a_broker_group("m", slave_wait_ms=5_000)
    group.a.crash()
    group.a.assign(Role.MASTER)
    group.a.host.settle()
    waiting = shown_causes(group.a)
    group.a.wait(5_000)
    assert Cause.MASTER not in group.a.master.causes.of(KEY), "no longer than it is told to"
    return waiting


@drives("broker", "rejoin_wait_s")
def a_master_of_several_waits_for_one_that_was_in_sync() -> Seen:
    broker = Broker("m")
    broker.node.identity.completed(True)
    broker.assign(Role.MASTER, slaves=2, awaited=("b:20881",))
    broker.wait(29_000)
    return [Reason(reason) for reason in broker.node.readonly_reasons if reason != Reason.SLAVE_DOWN]


@drives("broker", "catch_up_bytes_per_s")
def a_new_slave_is_seeded_slowly() -> Seen:
    group, client = a_broker_group(catch_up_bytes_per_s=1024, tail_bytes=2_000)
    for at in range(50):
        client.produce(f"m{at}", size=900)
        group.settle()
    group.cut()
    group.b = Broker("c", group.a.settings)
    group.b.assign(Role.SLAVE)
    group.connect()
    group.settle()
    return shown_causes(group.a)


@drives("broker", "lease_ms")
def a_consumer_is_silent_for_its_lease() -> Seen:
    group, client = a_broker_group("m", lease_ms=30_000)
    client.pull()
    group.settle()
    client.lost()
    group.a.wait(31_000)
    group.settle()
    return shown_causes(group.a)


@drives("broker", "unconsumed_hours")
def messages_that_a_group_has_not_consumed_are_old() -> Seen:
    group = test_retention.a_group(unconsumed="drop", unconsumed_hours=100)
    test_retention.consume_nothing(group)
    test_retention.days_pass(group, 5)
    group.look_after_logs()
    return [name for name in ("qmq_broker_dropped_messages_total",) if value(broker_page(group.a), name) > 0]


# Limits by operators.


@drives("operator", "expires_after_s")
def messages_are_too_old() -> Seen:
    group, client = limited.started(limited.HOUR)
    client.produce("m")
    group.settle()
    limited.hours_pass(group)
    return [name for name in ("qmq_broker_expired_messages_total",) if value(broker_page(group.a), name) == 1]


def full(setting: str, **bound: int) -> Seen:
    group, client = limited.started(OperatorLimits("s", OF_SUBJECT, **bound))
    client.link = link = NotingLink("c")
    while not link.reached.counts:
        client.produce("m", size=100)
        group.settle()
    assert samples(broker_page(group.a, link.reached), "qmq_broker_limited_subject") == [
        ({"broker_group": "g1", "setting": setting, "subject": "s"}, 1.0)
    ]
    assert client.code(client.opaque) == ErrorCode.SUBJECT_FULL
    shown = shown_reached(broker_page(group.a, link.reached))
    return shown if shown == [setting] else []


@drives("operator", "messages_max")
def as_many_messages_wait_as_may() -> Seen:
    return full("messagesMax", messages_max=2)


@drives("operator", "bytes_max")
def as_many_bytes_wait_as_may() -> Seen:
    return full("bytesMax", bytes_max=500)


@drives("operator", "per_second")
def a_group_gets_so_many_a_second() -> Seen:
    group, client = limited.started(OperatorLimits("s", "g", per_second=1))
    client.produce(*"abcdefghij")
    group.settle()
    for _ in range(3):
        client.pull(timeout_ms=60_000)
        group.settle()
    return shown_causes(group.a)


# Delay servers.


@drives("delay", "delay_days_max")
def a_message_is_due_too_late() -> Seen:
    copies, producer = a_group(delay_days_max=1)
    asked = producer.delayed(copies.now_ms + 25 * HOUR_MS, "m")
    copies.settle()
    [(_, why)] = producer.receipt(asked).refused
    return ["delay_days_max"] if "(delay_days_max)" in why else [why]


@drives("delay", "recurring_max")
def a_subject_has_too_many_schedules() -> Seen:
    copies, producer = a_group(recurring_max=1)
    for name in "ab":
        asked = producer.recur("put", name)
        copies.run(200)
    text = producer.text(asked)
    return ["recurring_max"] if "(recurring_max)" in text else [text]


@drives("delay", "loaded_messages_max")
def more_is_due_than_may_be_loaded() -> Seen:
    copies, producer = a_group(loaded_messages_max=100)
    copies.senders.routeless.add("s")
    for page in range(6):
        producer.delayed(copies.now_ms, *(f"m{page}-{at}" for at in range(50)))
        copies.run(1_000)
    stats = copies.a.master.stats()
    assert stats["due_on_disk_messages"] > 0 and stats["overdue_subjects"]["s"][2] == "none is there"
    name = "qmq_delayserver_due_messages"
    return [name, "DelayStats"] if stats["overdue_messages"] == value(delay_page(copies.a), name) == 300 else []


@drives("delay", "unknown_ms")
def a_batch_has_no_answer() -> Seen:
    copies, producer = a_group(unknown_ms=60_000)
    copies.senders.mute.add("g1")
    producer.delayed(copies.now_ms, "m")
    copies.run(2_000)
    stats, name = copies.a.master.stats(), "qmq_delayserver_due_messages"
    return [name, "DelayStats"] if stats["overdue_groups"]["g1"][0] == value(delay_page(copies.a), name) == 1 else []


@drives("delay", "token_bytes_per_s")
def messages_are_written_again_and_again() -> Seen:
    copies, producer = a_group()
    producer.delayed(copies.now_ms + HOUR_MS, *map(str, range(20)), key="k", size=900)
    copies.run(200)
    producer.link = link = NotingLink("c")
    link.ration = TokenRation(ANYBODY, NewSubjects(1, 1), SentBytes(10_000), copies.a.host.monotonic_ms)
    for hours in (2, 3):
        producer.reschedule("", copies.now_ms + hours * HOUR_MS, key="k")
        copies.run(200)
    return shown_reached(delay_page(copies.a, link.reached), "qmq_delayserver")


# Metaservers: each refusal is kept for Doctor's finding `routes`, by its token, with its setting.


def told_to_doctor(quotas: Quotas, setting: str) -> Seen:
    [why] = quotas.refusals(0.0).values()
    return ["routes", setting] if f"({setting})" in why else [why]


def watching(setting: str, **bounds) -> Seen:
    quotas = Quotas(Bounds(**{"subjects_max": 100, "token_subjects_max": 100, "token_watches_max": 100} | bounds))
    for _ in range(2):
        if not quotas.open(ANYBODY, 0.0):
            quotas.add(ANYBODY, 0, 0.0)
            quotas.add(ANYBODY, 1, 0.0)
    return told_to_doctor(quotas, setting)


@drives("metaserver", "watch_subjects_max")
def a_client_watches_too_much() -> Seen:
    return watching("watch_subjects_max", subjects_max=1)


@drives("metaserver", "token_subjects_max")
def a_token_watches_too_much() -> Seen:
    return watching("token_subjects_max", token_subjects_max=1)


@drives("metaserver", "token_watches_max")
def a_token_has_too_many_watches() -> Seen:
    return watching("token_watches_max", token_watches_max=1)


def bringing(setting: str, ration: NewSubjects) -> Seen:
    quotas = Quotas(Bounds(100, 100, 100))
    _, why = ration.allowed(ANYBODY, 3, now_ms=0)
    quotas.note(ANYBODY, why, 0.0)
    return told_to_doctor(quotas, setting)


@drives("metaserver", "new_subjects_per_minute")
def a_token_brings_too_many_subjects_at_once() -> Seen:
    return bringing("new_subjects_per_minute", NewSubjects(2, 100))


@drives("metaserver", "new_subjects_max")
def a_token_brings_too_many_subjects_in_all() -> Seen:
    return bringing("new_subjects_max", NewSubjects(100, 2))


# Watchdogs.


@drives("watchdog", "claims_max")
def brokers_answer_slowly() -> Seen:
    drain = Drain("g1", claims_max=1, page_rows=1, rest_ms=0)
    drain.page(row(1), after=("t", 1))
    drain.claim()
    assert len(drain.attempts()) == 1 and drain.next() is None
    page = watchdog_page(drain.core.counts, Stats(pending=2, claimed=1, parked=0, oldest_s=1.0, by_age={}))
    rows = {labels["state"]: count for labels, count in samples(page, "qmq_watchdog_rows")}
    assert value(page, "qmq_watchdog_claimed_total") == 1
    return ["rows of an outbox wait"] if rows == {"pending": 2, "claimed": 1, "parked": 0} else []


@drives("watchdog", "errors_max")
def a_row_fails_too_often() -> Seen:
    drain = Drain(errors_max=5)
    drain.page(row(1, errors=5), row(2))
    [(_, why)] = drain.claim().parked
    assert why == "too many errors"
    parked = value(watchdog_page(drain.core.counts), "qmq_watchdog_parked_total")
    return ["the watchdog's metrics"] if parked == 1 else []


@drives("watchdog", "unknown_s_max")
def nobody_can_say_whether_a_batch_is_stored() -> Seen:
    drain = Drain(unknown_ms_max=60_000)
    drain.page(row(1))
    drain.claim()
    [attempt] = drain.attempts()
    drain.answer(attempt, Unknown("lost"))
    unknown = value(watchdog_page(drain.core.counts), "qmq_watchdog_unknown_total")
    return ["the watchdog's metrics"] if unknown == 1 else []


# Consumers, on the broker in memory: their group's state at its master.


def listening(
    until: Callable[[BrokerInMemory], bool], *, fails: bool = False, is_behind: bool = False, **words
) -> None:
    """Give a consumer ten messages whose handlers never end, or fail, until the broker reports it; check it again with
    one more message.

    Args:
        is_behind: before that, messages of a higher priority wait for a handler that never ends.
    """

    async def test() -> None:
        async with BrokerInMemory() as broker, qmq.Producer(metaserver=broker.metaserver, app="test") as producer:
            for number in range(10):
                await producer.send(qmq.Message("s", {"n": str(number)}))
            consumer, ends = qmq.Consumer(metaserver=broker.metaserver, app="test", drain_s=0.1), asyncio.Event()

            async def handle(message: object) -> None:
                if fails:
                    raise ValueError("no")
                await ends.wait()

            if is_behind:
                consumer.listen("urgent", group="g", start="earliest", priority=1)(handle)
                for number in range(3):
                    await producer.send(qmq.Message("urgent", {"n": str(number)}))
                running = asyncio.create_task(consumer.run())
                [urgent] = consumer.listeners.values()
                await until_async(lambda: urgent._subscription and urgent._subscription.waiting_messages == 2)
            consumer.listen("s", group="g", start="earliest", **words)(handle)
            if not is_behind:
                running = asyncio.create_task(consumer.run())
            await until_async(lambda: until(broker))
            await producer.send(qmq.Message("s", {"n": "10"}))
            assert fails or until(broker), "what stops it was there in passing only"
            ends.set()
            consumer.stop()
            await running

    asyncio.run(test())


def unacked_messages(broker: BrokerInMemory) -> int:
    """Of all consumers of the group."""
    facts = broker._ask(lambda machine: machine._copies.master.causes._facts(KEY))
    return sum(consumer.unacked_messages for consumer in facts.group.consumers.values()) if facts is not None else 0


def seen_of_consumers(cause: Cause, unacked: int | None = None, **words) -> Seen:
    """Return a group's causes once it has this one, and as many messages as the limit allows."""
    seen: list[Cause] = []

    def until(broker: BrokerInMemory) -> bool:
        seen[:] = broker._ask(lambda machine: machine._copies.master.causes.of(KEY))
        return cause in seen and unacked in (None, unacked_messages(broker))

    listening(until, **words)
    return seen


def test_consumer_without_limits_gets_all_messages():
    """Otherwise exceeding the limits would show the same."""
    listening(lambda broker: unacked_messages(broker) >= 10, concurrency=10)


@drives("consumer", "concurrency")
def handlers_do_not_end() -> Seen:
    """Four messages ahead of the handlers'."""
    return seen_of_consumers(Cause.PREFETCH, 4 + 2, concurrency=2)


@drives("consumer", "prefetch_messages")
def no_room_for_more_ahead() -> Seen:
    return seen_of_consumers(Cause.PREFETCH, 2 + 2, concurrency=2, prefetch_messages=2)


@drives("consumer", "batch")
def handlers_of_lists_do_not_end() -> Seen:
    return seen_of_consumers(Cause.PREFETCH, batch=2, prefetch_messages=2)


@drives("consumer", "prefetch_bytes")
def no_room_for_bytes() -> Seen:
    return seen_of_consumers(Cause.PREFETCH, prefetch_bytes=1)


@drives("consumer", "unacked_max")
def no_room_for_more_without_ack() -> Seen:
    return seen_of_consumers(Cause.PREFETCH, 2, unacked_max=2)


@drives("consumer", "priority")
def a_higher_class_goes_first() -> Seen:
    """The four prefetched messages wait here; without that class the handler has one more."""
    return seen_of_consumers(Cause.PREFETCH, 4, is_behind=True)


@drives("consumer", "retry_delay")
def messages_come_again_later() -> Seen:
    return seen_of_consumers(Cause.LATER, retry_delay=600.0, fails=True)


@drives("consumer", "retries_max")
def messages_fail_too_often() -> Seen:
    listening(lambda broker: len(broker.dead_letters("s", "g")) == 10, retries_max=1, fails=True)
    return ["dead letter"]


# Producers, at a broker that applies the limit: the application's error.


def producing(test: Callable[[LocalBroker, qmq.Producer], Awaitable[None]], **words) -> None:
    async def run() -> None:
        async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, **words) as producer:
            await producer.send(qmq.Message("s", {"n": "0"}))
            await test(broker, producer)

    asyncio.run(run())


def hold_answers(broker: LocalBroker) -> None:
    broker.on_produce = lambda *_: True


def refused_at(broker_does: Callable[[LocalBroker], None], **words) -> qmq.Receipt:
    """Return the receipt of a message that a broker does not store."""
    receipts: list[qmq.Receipt] = []

    async def test(broker: LocalBroker, producer: qmq.Producer) -> None:
        broker_does(broker)
        receipts.append(await producer.send(qmq.Message("s", {"n": "1"})))

    producing(test, **words)
    return receipts[0]


@drives("producer", "timeout_s")
def no_outcome_until_the_deadline() -> Seen:
    receipt = refused_at(hold_answers, timeout_s=0.3)
    assert "no answer of g1 before the deadline" in receipt.reason
    return [receipt.outcome.value]


def be_readonly(broker: LocalBroker) -> None:
    broker.refuse_with = BrokerReadOnly("slave_down")


@drives("producer", "readonly_wait_s")
def all_groups_are_readonly() -> Seen:
    receipt = refused_at(be_readonly, readonly_wait_s=0)
    assert "slave_down" in receipt.reason
    return [receipt.outcome.value]


@drives("producer", "answer_timeout_s")
def a_connection_owes_an_answer() -> Seen:
    lines: list[str] = []

    async def test(broker: LocalBroker, producer: qmq.Producer) -> None:
        hold_answers(broker)
        await producer.send(qmq.Message("s", {"n": "1"}))
        assert len(broker.attempts) > 2, "the batch went on another connection"

    log, note = logging.getLogger("qmq.client"), logging.Handler(logging.WARNING)
    note.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(note)
    try:
        producing(test, answer_timeout_s=0.1, timeout_s=1.0)
    finally:
        log.removeHandler(note)
    return ["a line of the application's log"] if any("no answer for 0.1 s" in line for line in lines) else []


def a_full_queue(**words) -> str:
    refusals: list[str] = []

    async def test(broker: LocalBroker, producer: qmq.Producer) -> None:
        hold_answers(broker)
        try:
            while True:
                producer.send_nowait(qmq.Message("s", {"n": "1"}), lambda receipt: None)
        except QueueFull as error:
            refusals.append(str(error))

    producing(test, timeout_s=0.3, **words)
    return refusals[0]


@drives("producer", "queue_messages_max")
def so_many_messages_wait() -> Seen:
    return ["QueueFull"] if "queue_messages_max 3" in a_full_queue(queue_messages_max=3) else []


@drives("producer", "queue_bytes_max")
def so_many_bytes_wait() -> Seen:
    return ["QueueFull"] if "queue_bytes_max 300" in a_full_queue(queue_bytes_max=300) else []
