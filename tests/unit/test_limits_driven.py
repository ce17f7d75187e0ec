"""Shell. Each limit that stops or slows a client is exceeded once, and shows the name in tests/unit/test_limits.py: in
`Lag`, Doctor, a metric or an error.

Rows of operators, brokers and delay servers read the value on the page of metrics that a process would make of its core
(tests/support/pages.py), and some Doctor's finding about it. Those of consumers read the core's causes for such a page.
Limits of the process, and not its core, are exceeded on processes (`ON_PROCESSES`), others by the tests of their
component (`ELSEWHERE`). Rows marked `Nobody` are not driven, as they stop no client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import pytest

import qmq
from qmq.broker.group_status import Cause
from qmq.errors import ErrorCode, QueueFull
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.rations import NewProducers, TokenGroups, TokenRation
from qmq.remoting.packet import PacketReader
from qmq.replication.readonly import Reason
from qmq.rights import Caller, TokenRole
from qmq.server.overload import LimitsReached
from qmq.testing import Broker as BrokerInMemory
from qmq.tools.findings import judge_limits
from qmq.types import Role
from tests.integration.test_connections import REACHES
from tests.integration.test_overload import READONLY
from tests.support.pages import broker_page, delay_page, samples, value
from tests.support.waiting import until_async
from tests.unit.broker import limited, test_new_groups, test_retention, test_subscriptions
from tests.unit.broker.world import Broker, Client, FakeLink, Group
from tests.unit.client import test_producer_outcomes
from tests.unit.client.world import LocalBroker, cluster, producer_of
from tests.unit.delayserver import test_master
from tests.unit.delayserver.world import HOUR_MS, a_group
from tests.unit.metaserver import test_hub
from tests.unit.server import test_tokens
from tests.unit.test_limits import BROKER, CONSUMER, DELAY, METASERVER, OPERATOR, PRODUCER, REACHED, WATCHDOG, Nobody
from tests.unit.watchdog import test_drain_plan

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
ELSEWHERE = {
    ("broker", "new_subjects_max"): test_tokens.test_refusal_names_the_setting,
    ("broker", "token_groups_max"): test_new_groups.test_new_groups_of_a_token_are_rationed,
    ("broker", "token_subscriptions_max"): test_subscriptions.test_subscriptions_of_a_token_are_bounded,
    ("delay", "token_bytes_per_s"): test_master.test_reschedule_counts_towards_the_token_ration,
    ("metaserver", "watch_subjects_max"): test_hub.test_subject_over_the_bound_is_refused_alone,
    ("metaserver", "token_subjects_max"): test_hub.test_subjects_are_bounded_per_token,
    ("metaserver", "token_watches_max"): test_hub.test_watches_are_bounded_per_token,
    ("metaserver", "new_subjects_per_minute"): test_tokens.test_refusal_names_the_setting,
    ("metaserver", "new_subjects_max"): test_tokens.test_refusal_names_the_setting,
    ("watchdog", "claims_max"): test_drain_plan.test_unknown_batches_do_not_count_as_under_way,
    ("watchdog", "errors_max"): test_drain_plan.test_invalid_or_failed_row_blocks_no_other,
    ("watchdog", "unknown_s_max"): test_drain_plan.test_unknown_batch_is_released_after_a_day,
    ("producer", "timeout_s"): test_producer_outcomes.test_silent_group_is_given_up,
    ("producer", "readonly_wait_s"): test_producer_outcomes.test_readonly_wait_zero_refuses_at_once,
}
"""Rows that the tests of their component exceed; these read the name in the error, the refusal or the counter."""
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
    elsewhere = {("broker", setting) for setting in ON_PROCESSES} | ELSEWHERE.keys()
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
    assert all(setting in TABLES[process] for process, setting in ELSEWHERE)


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


@pytest.mark.parametrize("setting", sorted(name for name, named in (BROKER | DELAY).items() if named is REACHED))
def test_reached_limit_is_on_the_page_and_in_doctor(setting):
    reached = LimitsReached()
    reached.reached(setting, 0)
    assert shown_reached(broker_page(Group.made().start().a, reached)) == [setting]


def slave_lags(**settings) -> Seen:
    group, client = a_broker_group(**settings)
    client.produce("m")
    group.a.host.settle()
    for _ in range(2):
        group.a.wait(60)
    reasons = samples(broker_page(group.a), "qmq_broker_readonly")
    return [Reason(labels["reason"]) for labels, is_one in reasons if is_one]


for setting, most in {"slave_lag_ms_max": 50, "slave_lag_bytes_max": 100}.items():
    drives("broker", setting)(partial(slave_lags, **{setting: most}))


@drives("broker", "slave_wait_ms")
def a_master_waits_for_its_slave() -> Seen:
    group, _ = a_broker_group("m", slave_wait_ms=5_000)
    group.a.crash()
    group.a.assign(Role.MASTER)
    group.a.host.settle()
    waiting = shown_causes(group.a)
    group.a.wait(5_000)
    assert Cause.MASTER not in group.a.master.causes.of(KEY), "no longer than the order states"
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


drives("operator", "messages_max")(partial(full, "messagesMax", messages_max=2))
drives("operator", "bytes_max")(partial(full, "bytesMax", bytes_max=500))


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


EXCEEDED: dict[str, dict[str, Any]] = {
    "concurrency": {"cause": Cause.PREFETCH, "unacked": 4 + 2, "concurrency": 2},  # four ahead of the handlers'
    "prefetch_messages": {"cause": Cause.PREFETCH, "unacked": 2 + 2, "concurrency": 2, "prefetch_messages": 2},
    "batch": {"cause": Cause.PREFETCH, "batch": 2, "prefetch_messages": 2},
    "prefetch_bytes": {"cause": Cause.PREFETCH, "prefetch_bytes": 1},
    "unacked_max": {"cause": Cause.PREFETCH, "unacked": 2, "unacked_max": 2},
    "priority": {"cause": Cause.PREFETCH, "unacked": 4, "is_behind": True},  # without the other class one more
    "retry_delay": {"cause": Cause.LATER, "retry_delay": 600.0, "fails": True},
}
"""Setting of a consumer -> a listener that exceeds it, and what its master shows."""
DRIVES.update({("consumer", setting): partial(seen_of_consumers, **words) for setting, words in EXCEEDED.items()})


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


def full_queue(setting: str, most: int) -> Seen:
    refusals: list[str] = []

    async def test(broker: LocalBroker, producer: qmq.Producer) -> None:
        hold_answers(broker)
        try:
            while True:
                producer.send_nowait(qmq.Message("s", {"n": "1"}), lambda receipt: None)
        except QueueFull as error:
            refusals.append(str(error))

    producing(test, timeout_s=0.3, **{setting: most})
    return ["QueueFull"] if f"{setting} {most}" in refusals[0] else []


drives("producer", "queue_messages_max")(partial(full_queue, "queue_messages_max", 3))
drives("producer", "queue_bytes_max")(partial(full_queue, "queue_bytes_max", 300))
