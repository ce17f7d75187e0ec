"""Shell. Each limit that stops or slows somebody is driven over once, and what is stopped then has the name that
tests/unit/test_limits.py says: as `Lag`, Doctor, a metric or an error show it.

Most rows ask a core, as that is what pages show: a cause of the core is on the page of metrics, and in Doctor if it is
an alarm (tests/unit/broker/test_causes.py, tests/unit/tools/test_finding.py). Limits that are the process's own, and
not its core's, are driven on processes (`ON_PROCESSES`). A row marked `Nobody` is not driven: nobody is stopped there,
so there is nothing to look for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

import qmq
from qmq.broker.causes import Cause
from qmq.client.batch_life import Unknown
from qmq.errors import Overloaded
from qmq.metaserver.quotas import Bounds, Quotas
from qmq.rations import NewSubjects
from qmq.remoting.packet import PacketReader
from qmq.replication.readonly import Reason
from qmq.rights import Caller, TokenRole
from qmq.testing import Broker as BrokerInMemory
from qmq.types import Role
from tests.integration.test_connections import REACHES
from tests.integration.test_overload import READONLY
from tests.support.waiting import until_async
from tests.unit.broker import test_retention
from tests.unit.broker.world import Broker, Client, FakeLink, Group
from tests.unit.delayserver.test_races import a_group
from tests.unit.delayserver.world import HOUR_MS
from tests.unit.server.test_tokens import limits, produce
from tests.unit.test_limits import BROKER, CONSUMER, DELAY, METASERVER, REACHED, WATCHDOG, Nobody
from tests.unit.watchdog.test_draining import Drain, row

Seen = Iterable[object]
KEY = ("s", "g")
ANYBODY = Caller("app", TokenRole.CLIENT)
TABLES = {"broker": BROKER, "delay": DELAY, "metaserver": METASERVER, "watchdog": WATCHDOG, "consumer": CONSUMER}
DRIVES: dict[tuple[str, str], Callable[[], Seen]] = {}
ON_PROCESSES = REACHES.keys() | READONLY.keys()
"""Driven on a real broker by tests/integration/test_connections.py, which looks at metrics, log and Doctor, and
test_overload.py, which fills memory, has no disk left, and asks for its reasons."""


def drives(process: str, *settings: str) -> Callable[[Callable[[], Seen]], Callable[[], Seen]]:
    """This function drives the limit over; it returns by which names that is seen."""

    def note(drive: Callable[[], Seen]) -> Callable[[], Seen]:
        DRIVES.update({(process, setting): drive for setting in settings})
        return drive

    return note


def rows() -> list[tuple[str, str]]:
    found = {(name, setting) for name, table in TABLES.items() for setting in table}
    same = {("delay", setting) for setting in BROKER.keys() & DELAY.keys()}  # one code, driven in a broker
    elsewhere = {("broker", setting) for setting in ON_PROCESSES}
    return sorted(row for row in found - same - elsewhere if not isinstance(TABLES[row[0]][row[1]], Nobody))


@pytest.mark.parametrize(("process", "setting"), rows())
def test_what_a_limit_stops_has_its_name(process, setting):
    drive = DRIVES.get((process, setting))
    assert drive is not None, "a limit that stops somebody has a row here"
    seen, named = list(drive()), TABLES[process][setting]
    if isinstance(named, Cause | Reason):
        assert named in seen
    elif named is REACHED:
        assert seen == [setting]
    else:
        assert seen and [name for name in seen if str(name) not in f"{named} ({setting})"] == []


def test_each_row_is_of_a_limit_that_is_there():
    assert set(DRIVES) == set(rows())


# Brokers, and what delay servers have of them.


def a_broker_group(*ids: str, **settings) -> tuple[Group, Client]:
    """A group of two brokers with a consumer, and messages that it has not asked for."""
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
    assert group.a.counters.refused_messages == 1 and "(message_bytes_max)" in why
    return ["qmq_broker_refused_messages_total"]


def refused_by(**bounds) -> Seen:
    allowed = limits(**bounds)
    with pytest.raises(Overloaded) as caught:
        for number in range(10):
            allowed.check(produce(f"s{number}"), {}, now_ms=0)
    return [caught.value.limit]


@drives("broker", "new_subjects_max")
def too_many_subjects_in_all() -> Seen:
    return refused_by(in_all=2)


class NotingLink(FakeLink):
    def __init__(self, peer):
        super().__init__(peer)
        self.limits: list[str] = []

    def refuse(self, request, error):
        self.limits.append(error.limit)
        super().refuse(request, error)


@drives("broker", "window_bytes")
def too_much_without_an_answer() -> Seen:
    window = 2 * PacketReader.STAGING_BYTES
    group, client = a_broker_group(window_bytes=window, message_bytes_max=window)
    client.link = link = NotingLink("c")
    while not link.limits:
        client.produce("m", size=30_000)
    return link.limits


def slave_lags(**settings) -> Seen:
    group, client = a_broker_group(**settings)
    client.produce("m")
    group.a.host.settle()
    for _ in range(2):
        group.a.wait(60)
    return group.a.node.readonly_reasons


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
    waiting = group.a.master.causes.of(KEY)
    group.a.wait(5_000)
    assert Cause.MASTER not in group.a.master.causes.of(KEY), "no longer than it is told to"
    return waiting


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
    return group.a.master.causes.of(KEY)


@drives("broker", "lease_ms")
def a_consumer_is_silent_for_its_lease() -> Seen:
    group, client = a_broker_group("m", lease_ms=30_000)
    client.pull()
    group.settle()
    client.lost()
    group.a.wait(31_000)
    group.settle()
    return group.a.master.causes.of(KEY)


@drives("broker", "unconsumed_hours")
def messages_that_a_group_has_not_consumed_are_old() -> Seen:
    group = test_retention.a_group(unconsumed="drop", unconsumed_hours=100)
    test_retention.consume_nothing(group)
    test_retention.days_pass(group, 5)
    group.look_after_logs()
    return ["qmq_broker_dropped_messages_total"] if group.a.log.state.kept.unconsumed[KEY] else []


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
    return ["qmq_delayserver_due_messages", "DelayStats"] if stats["overdue_messages"] == 300 else []


@drives("delay", "unknown_ms")
def a_batch_has_no_answer() -> Seen:
    copies, producer = a_group(unknown_ms=60_000)
    copies.senders.mute.add("g1")
    producer.delayed(copies.now_ms, "m")
    copies.run(2_000)
    stats = copies.a.master.stats()
    return ["qmq_delayserver_due_messages", "DelayStats"] if stats["overdue_groups"]["g1"][0] == 1 else []


# Metaservers: each refusal is kept for Doctor's finding `routes`, by its token, and names its setting.


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
    return ["rows of an outbox wait"]


@drives("watchdog", "errors_max")
def a_row_fails_too_often() -> Seen:
    drain = Drain(errors_max=5)
    drain.page(row(1, errors=5), row(2))
    [(_, why)] = drain.claim().parked
    assert drain.core.counts.parked == 1 and why == "too many errors"
    return ["the watchdog's metrics"]


@drives("watchdog", "unknown_s_max")
def nobody_can_say_whether_a_batch_is_stored() -> Seen:
    drain = Drain(unknown_ms_max=60_000)
    drain.page(row(1))
    drain.claim()
    [attempt] = drain.attempts()
    drain.answer(attempt, Unknown("lost"))
    assert drain.core.counts.unknown == 1
    return ["the watchdog's metrics"]


# Consumers, on the broker in memory: what its master says of their group.


def listening(until: Callable[[BrokerInMemory], bool], *, fails: bool = False, **words) -> None:
    """Let a consumer have ten messages whose handlers do not end, or fail, until the broker says so, and still says so
    when one more message is there."""

    async def test() -> None:
        async with BrokerInMemory() as broker, qmq.Producer(metaserver=broker.metaserver, app="test") as producer:
            for number in range(10):
                await producer.send(qmq.Message("s", {"n": number}))
            consumer, ends = qmq.Consumer(metaserver=broker.metaserver, app="test", drain_s=0.1), asyncio.Event()

            @consumer.listen("s", group="g", start="earliest", **words)
            async def handle(message: object) -> None:
                if fails:
                    raise ValueError("no")
                await ends.wait()

            running = asyncio.create_task(consumer.run())
            await until_async(lambda: until(broker))
            await producer.send(qmq.Message("s", {"n": 10}))
            assert fails or until(broker), "what stops it was there in passing only"
            ends.set()
            consumer.stop()
            await running

    asyncio.run(test())


def unacked_messages(broker: BrokerInMemory) -> int:
    """Of all consumers of the group."""
    facts = broker._ask(lambda machine: machine._copies.master.causes._facts(KEY))
    return sum(one.unacked_messages for one in facts.group.consumers.values()) if facts is not None else 0


def seen_of_consumers(cause: Cause, unacked: int | None = None, **words) -> Seen:
    """Return the causes of a group once it has this one, and as many messages as the limit leaves it."""
    seen: list[Cause] = []

    def until(broker: BrokerInMemory) -> bool:
        seen[:] = broker._ask(lambda machine: machine._copies.master.causes.of(KEY))
        return cause in seen and unacked in (None, unacked_messages(broker))

    listening(until, **words)
    return seen


def test_without_these_limits_a_consumer_has_all_messages():
    """Else what drives its limits over would show the same."""
    listening(lambda broker: unacked_messages(broker) >= 10, concurrency=10)


@drives("consumer", "concurrency")
def handlers_do_not_end() -> Seen:
    """Four messages ahead of what the handlers have."""
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


@drives("consumer", "retry_delay")
def messages_come_again_later() -> Seen:
    return seen_of_consumers(Cause.LATER, retry_delay=600.0, fails=True)


@drives("consumer", "retries_max")
def messages_fail_too_often() -> Seen:
    listening(lambda broker: len(broker.dead_letters("s", "g")) == 10, retries_max=1, fails=True)
    return ["dead letter"]
