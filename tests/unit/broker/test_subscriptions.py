"""Core. Terms of a SUBSCRIBE; subscriptions, leases and waiting pulls on their own clock, without a master."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from qmq.broker.subscriptions import (
    CHECKED_WITHIN_MS,
    LOOKING_MS,
    NAMES_MAX,
    PULLS_IN_FLIGHT_MAX,
    Subscription,
    Subscriptions,
    WaitingPull,
    read_terms,
)
from qmq.codec import TAGS_MAX
from qmq.dead_letters import PRUNER
from qmq.errors import (
    ErrorCode,
    InvalidAck,
    InvalidName,
    InvalidRequest,
    Overloaded,
    SubscriptionReplaced,
    UnknownSubscription,
)
from qmq.log.fold import State
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.log.progress_frame import NOT_BEGUN, Departure
from qmq.log.requeued import RequeuedRange
from qmq.remoting.commands import Command, Pull, encode_subscribe
from qmq.remoting.packet import Packet
from qmq.replication.ports import QUIET_MS
from qmq.subjects import dead_letter_subject
from tests.unit.broker.world import FakeLink

WORDS = [f"tag{number}" for number in range(TAGS_MAX)]


def read(**changed):
    fields = json.loads(encode_subscribe(subject="s", group="g", consumer="c"))
    body = memoryview(json.dumps(fields | changed).encode())
    return read_terms(Packet(Command.SUBSCRIBE, 1, 0, Command.SUBSCRIBE, body))


@pytest.mark.parametrize(
    "changed",
    [
        {"start": "tomorrow"},
        {"tag_mode": "some"},
        {"tags": [*WORDS, "more"]},
        *({"tags": ["pay", none]} for none in ("", 1, None, "\ud800", "a\udfff")),
        *({name: -1} for name in ("deliveries_max", "held_end", "since_ms")),
        *({name: "\ud800"} for name in ("subject", "group", "consumer")),
    ],
    ids=ascii,
)
def test_invalid_terms_are_refused(changed):
    with pytest.raises(InvalidRequest):
        read(**changed)


@pytest.mark.parametrize("name", ["a/b", "n" * 101])
@pytest.mark.parametrize("field", ["subject", "group", "consumer"])
def test_invalid_names_are_refused(field, name):
    with pytest.raises(InvalidName):
        read(**{field: name})


@pytest.mark.parametrize(
    "changed",
    [
        *({"start": start} for start in ("latest", "earliest", "since")),
        *({"tag_mode": mode} for mode in ("any", "all")),
        *({"tags": tags} for tags in ([], WORDS, ["\ud7ff\ue000"])),
        {"deliveries_max": 0, "held_end": 1, "since_ms": 2},
        {"begins": True, "exclusive_ms": 5},
    ],
    ids=str,
)
def test_terms_are_decoded(changed):
    assert changed.items() <= read(**changed).items()


@pytest.mark.parametrize("fields", [{}, {"begins": 1, "exclusive_ms": "5"}], ids=["nothing", "nonsense"])
def test_older_client_has_defaults(fields):
    assert {"begins": False, "exclusive_ms": 0}.items() <= read(**fields).items()


def test_dead_letter_has_no_delivery_limit():
    assert read(deliveries_max=3)["deliveries_max"] == 3
    assert read(deliveries_max=3, subject=dead_letter_subject("s", "g"))["deliveries_max"] == 0


KEY = ("s", "g", "c")
LEASE_MS = 10_000


class Consumers:
    """A `Subscriptions` over a fold that a test fills."""

    def __init__(self, lease_ms: int = LEASE_MS) -> None:
        self.state = State()
        self.state.groups["s", "g"] = Group(0)
        self.now = Subscriptions(SimpleNamespace(state=self.state), lease_ms=lease_ms, now_ms=0)
        self.pulls = 0

    def joined(self, name: str = "c", link: FakeLink | None = None, now_ms: int = 0, **terms) -> Subscription:
        terms = {"held_end": 0, **terms}
        return self.now.subscribe(link or FakeLink(name), subject="s", group="g", consumer=name, now_ms=now_ms, **terms)

    def waits(self, subscription: Subscription, deadline_ms: int, now_ms: int = 0) -> WaitingPull:
        self.pulls += 1
        packet = Packet(Command.PULL, self.pulls, 0, Command.PULL, memoryview(b""))
        pull = Pull(subscription.id, 1, 1, deadline_ms - now_ms)
        waiting = WaitingPull(subscription.link, packet, pull, deadline_ms)
        self.now.wait(subscription, waiting, now_ms)
        return waiting

    def has(self, name: str, *unacked: tuple[int, int]) -> None:
        """Make these pull sequences unacked."""
        ranges = [UnackedRange(begin, begin, end - begin, 1) for begin, end in unacked]
        self.state.groups["s", "g"].consumers[name] = Consumer(max((end for _, end in unacked), default=0), ranges)

    @property
    def alive(self) -> set[str]:
        """Return the consumers with a lease."""
        return {consumer for _, _, consumer in self.now._seen}

    def left(self) -> dict[str, object]:
        """Return everything in memory about consumers."""
        kept = {name: value for name, value in vars(self.now).items() if isinstance(value, (dict, list, set))}
        return {name: value for name, value in kept.items() if value}


def is_looking(_: Subscription) -> bool:
    return True


def is_done(_: Subscription) -> bool:
    return False


# Subscriptions.


def test_own_subscription_can_be_replaced():
    consumers, link = Consumers(), FakeLink("c")
    old = consumers.joined(link=link)
    new = consumers.joined(link=link)
    assert consumers.now.find(link, new.id, 0) is new
    with pytest.raises(UnknownSubscription):
        consumers.now.find(link, old.id, 0)
    assert list(consumers.now.connected) == consumers.now.connected_to("s", "g") == [new]


def test_replacing_subscription_survives_link_loss():
    consumers = Consumers()
    old = consumers.joined()
    replaced = consumers.waits(old, 400)
    new = consumers.joined()
    assert old.link.answers[replaced.packet.opaque][0] == ErrorCode.SUBSCRIPTION_REPLACED
    assert not consumers.now.all_waiting() and not old.waiting
    waiting = consumers.waits(new, 500)
    with pytest.raises(SubscriptionReplaced):
        consumers.now.find(old.link, old.id, 0)
    consumers.now.link_lost(old.link)
    with pytest.raises(UnknownSubscription):
        consumers.now.find(old.link, old.id, 0)
    assert consumers.now.find(new.link, new.id, 0) is new and list(consumers.now.connected) == [new]
    assert consumers.now.waiting_in("s", "g") == [new] and list(new.waiting) == [waiting]


def test_lost_connection_leaves_only_its_lease():
    consumers = Consumers()
    lost = consumers.joined(exclusive_ms=1)
    consumers.waits(lost, 500)
    assert consumers.now.exclusive_waiting == consumers.now.waiting_at(lost.link) == [lost]
    assert consumers.now.groups_waiting_on("s") == [("s", "g")]
    consumers.now.link_lost(lost.link)
    assert consumers.now.overdue(CHECKED_WITHIN_MS, is_done) == []
    assert consumers.left() == {"_seen": {KEY: 0}}
    assert consumers.now.expired(LEASE_MS + 1) == [] and not consumers.left()


@pytest.mark.parametrize("begins", [True, False])
def test_lease_end_of_an_idle_client_leaves_nothing(begins):
    """Each process of an application has its own name."""
    consumers = Consumers()
    subscription = consumers.joined(begins=begins)
    consumers.now.note_reporting(subscription)
    consumers.now.link_lost(subscription.link)
    assert consumers.now.expired(LEASE_MS + 1) == [] and not consumers.left()


@pytest.mark.parametrize("begins", [True, False])
def test_move_leaves_nothing_of_the_group(begins):
    consumers = Consumers()
    subscription = consumers.joined(begins=begins)
    consumers.now.note_reporting(subscription)
    consumers.now.begin(subscription, [(0, 1)])
    consumers.now.move("s", "g")
    consumers.now.link_lost(subscription.link)
    assert not consumers.left() and "an operator moved g" in str(subscription.over)


def test_move_ends_no_other_group():
    consumers = Consumers()
    for subject, name in (("s", "g"), ("s", "h"), ("t", "g")):
        consumers.now.subscribe(FakeLink("c"), subject=subject, group=name, consumer="c", held_end=0, now_ms=0)
    consumers.now.move("s", "g")
    assert {subscription.key[:2] for subscription in consumers.now.connected} == {("s", "h"), ("t", "g")}
    assert consumers.alive == {"c"}


@pytest.mark.parametrize("held_end", [0, 2, 3])
def test_consumer_with_delivered_messages_continues(held_end):
    consumers = Consumers()
    consumers.state.groups["s", "g"].consumers["c"] = Consumer(3, [UnackedRange(2, 2, 1, 1)], [3])
    assert consumers.joined(held_end=held_end).resend == held_end


@pytest.mark.parametrize("is_known", [True, False], ids=["others", "nothing"])
def test_consumer_with_foreign_messages_begins_anew(is_known):
    consumers = Consumers()
    if is_known:
        consumers.state.groups["s", "g"].consumers["c"] = Consumer(3, [UnackedRange(2, 2, 1, 1)], [3])
    with pytest.raises(InvalidAck):
        consumers.joined(held_end=4)
    assert not consumers.left()


# Exclusive turns.


def test_sharing_consumers_block_exclusive_ones_by_unacked():
    consumers = Consumers()
    consumers.joined("a")
    subscription = consumers.joined("b", exclusive_ms=5)
    assert consumers.now.has_its_turn(subscription, is_done)
    consumers.has("a")
    consumers.has("b", (0, 1))
    consumers.has(PRUNER, (0, 1))
    assert consumers.now.has_its_turn(subscription, is_done)
    consumers.has("a", (0, 1))
    assert not consumers.now.has_its_turn(subscription, is_done)


@pytest.mark.parametrize("others", [(1, "b"), (2, "a")], ids=["by its clock", "by its name"])
def test_first_exclusive_consumer_has_its_turn(others):
    consumers = Consumers()
    first = consumers.joined(others[1], exclusive_ms=others[0])
    second = consumers.joined("c", exclusive_ms=2)
    assert consumers.now.has_its_turn(first, is_done) and not consumers.now.has_its_turn(second, is_done)
    assert consumers.now.has_its_turn(second, lambda subscription: subscription is first), (
        "a switched-off one is passed over"
    )


# Leases.


def test_lease_ends_after_silence():
    consumers = Consumers()
    consumers.has("c", (0, 1))
    consumers.joined()
    assert consumers.now.expired(LEASE_MS) == [] and consumers.alive == {"c"}
    assert consumers.now.expired(LEASE_MS + 1) == [KEY] and not consumers.alive
    assert not list(consumers.now.connected), "it subscribes again"


@pytest.mark.parametrize("packet", ["request", "heartbeat", "subscribe", "heartbeat of a replaced connection"])
def test_any_packet_renews_the_lease(packet):
    consumers = Consumers()
    replaced, subscription = consumers.joined(), consumers.joined()
    match packet:
        case "request":
            consumers.now.find(subscription.link, subscription.id, 6_000)
        case "heartbeat":
            consumers.now.heartbeat(subscription.link, 6_000)
        case "subscribe":
            consumers.joined(now_ms=6_000)
        case _:
            consumers.now.heartbeat(replaced.link, 6_000)
    end_ms = 10_000 if "replaced" in packet else 16_000
    consumers.now.expired(end_ms)
    assert consumers.alive
    consumers.now.expired(end_ms + 1)
    assert not consumers.alive


def test_mastership_starts_leases_and_retries():
    consumers = Consumers()
    consumers.has("c", (0, 1))
    consumers.state.groups["s", "g"].requeued.add(RequeuedRange(5, 1, 1, 2_048_500))
    consumers.state.groups["t", "g"] = Group(0)
    consumers.now.begin_mastership(3_000)
    assert 0 < consumers.now.due_in_ms(2_047_900) <= 600
    assert consumers.now.expired(13_000) == [] and consumers.now.expired(13_001) == [KEY]


@pytest.mark.parametrize(("ticks", "end_ms"), [((2_500,), 10_000), ((2_501,), 10_001), ((100, 12_600), 20_000)])
def test_late_tick_extends_each_lease(ticks, end_ms):
    consumers = Consumers()
    consumers.joined()
    for now_ms in ticks:
        consumers.now.ticked(now_ms)
    consumers.now.expired(end_ms)
    assert consumers.alive
    consumers.now.expired(end_ms + 1)
    assert not consumers.alive


def test_late_tick_begins_no_lease_in_the_future():
    consumers = Consumers()
    consumers.joined(now_ms=59_000)
    consumers.now.ticked(60_000)
    consumers.now.expired(70_001)
    assert not consumers.alive


# Quiet times.


@pytest.mark.parametrize(("lease_ms", "quiet_ms"), [(4_000, 0), (8_003, 0), (8_004, QUIET_MS), (60_000, QUIET_MS)])
def test_short_lease_needs_frequent_ticks(lease_ms, quiet_ms):
    assert Consumers(lease_ms).now.quiet_ms(0) == quiet_ms


def test_nothing_is_due_before_the_first_lease_ends():
    consumers = Consumers()
    consumers.joined("a")
    consumers.joined("b", now_ms=5_000)
    quiet = [consumers.now.quiet_ms(now_ms) for now_ms in (5_000, 9_000, 9_400, 10_000, 10_500)]
    assert quiet == [QUIET_MS, QUIET_MS, 600, 0, 0]


def test_nothing_is_due_before_the_first_deadline():
    consumers = Consumers()
    subscription, other = consumers.joined("a"), consumers.joined("b")
    consumers.waits(subscription, 900)
    consumers.waits(other, 700)
    assert [consumers.now.quiet_ms(now_ms) for now_ms in (0, 600, 700, 701)] == [700, 100, 0, 0]


# Waiting pulls.


def test_consumers_of_a_connection_are_bounded():
    """One connection with any number of names took 2 KB each, and its leases stopped the broker. Names free places."""
    consumers, link = Consumers(), FakeLink("many")
    first, *_ = [consumers.joined(f"c{number}", link) for number in range(NAMES_MAX)]
    with pytest.raises(Overloaded, match=f"this connection has {NAMES_MAX} consumers of group 'g'"):
        consumers.joined("more", link)
    consumers.joined("c5", link), consumers.joined("elsewhere")
    consumers.now.subscribe(link, subject="s", group="other", consumer="more", now_ms=0, held_end=0)
    consumers.now.forget(first)
    consumers.joined("more", link)
    consumers.now.link_lost(link)
    assert [name for name, _ in consumers.now._names] == [consumers.now._by_consumer["s", "g", "elsewhere"].link]


def test_subscriptions_of_a_token_are_bounded():
    """Each costs every tick time, over any number of connections."""
    consumers, links = Consumers(), [FakeLink("first"), FakeLink("second"), FakeLink("other")]
    for link in links:
        link.ration.holder, link.ration.subscriptions_max = "other" if link.peer == "other" else "shop", 2
    first, *_ = [consumers.joined(f"c{number}", links[number]) for number in range(2)]
    with pytest.raises(Overloaded, match="clients of token 'shop' have 2 subscriptions") as caught:
        consumers.joined("more", links[0])
    assert caught.value.limit == "token_subscriptions_max"
    consumers.joined("c1", links[0]), consumers.joined("theirs", links[2])
    consumers.now.forget(first), consumers.now.link_lost(links[1])
    consumers.joined("more", links[1])
    for link in links:
        consumers.now.link_lost(link)
    assert not consumers.now._tokens


def test_pulls_of_a_subscription_are_bounded():
    consumers = Consumers()
    subscription = consumers.joined()
    subscription.in_flight = PULLS_IN_FLIGHT_MAX - 2
    consumers.waits(subscription, 500)
    consumers.waits(subscription, 500)
    with pytest.raises(Overloaded):
        consumers.waits(subscription, 500)
    assert len(subscription.waiting) == 2


def test_pulls_end_at_their_deadlines():
    consumers = Consumers()
    subscription = consumers.joined()
    soon, same, late = (consumers.waits(subscription, ms) for ms in (200, 200, 300))
    assert len(consumers.now._deadlines) == 1, "a thousand subscriptions cost a tick nothing"
    assert consumers.now.overdue(199, is_done) == []
    assert consumers.now.overdue(200, is_done) == [soon, same] and consumers.now.waiting_in("s", "g") == [subscription]
    assert consumers.now.quiet_ms(200) == 100
    assert consumers.now.overdue(300, is_done) == [late] and consumers.now.waiting_in("s", "g") == []
    assert consumers.now.overdue(CHECKED_WITHIN_MS, is_done) == [] and consumers.now.quiet_ms(300) == QUIET_MS


def test_deadlines_do_not_pile_up():
    consumers = Consumers()
    subscription = consumers.joined()
    pulls = [consumers.waits(subscription, ms) for ms in (300, 200, 500)]
    assert [consumers.now.overdue(now_ms, is_done) for now_ms in (200, 300)] == [[pulls[1]], [pulls[0]]]
    assert len(consumers.now._deadlines) == 1


def test_overdue_pull_waits_for_its_scan():
    consumers = Consumers()
    subscription = consumers.joined()
    pull = consumers.waits(subscription, 100)
    for now_ms in (100, 101, 99 + LOOKING_MS):
        assert consumers.now.overdue(now_ms, is_looking) == []
    assert consumers.now.overdue(100 + LOOKING_MS, is_looking) == [pull]
    pull = consumers.waits(subscription, 2_000, now_ms=1_900)
    assert consumers.now.overdue(2_000, is_looking) == []
    assert consumers.now.overdue(2_001, is_done) == [pull]


def test_ended_subscription_leaves_the_deadlines():
    consumers = Consumers(lease_ms=1 << 40)
    subscription = consumers.joined()
    consumers.waits(subscription, 10_000_000, now_ms=50)
    consumers.now.forget(subscription)
    assert consumers.now.quiet_ms(CHECKED_WITHIN_MS - 450) == 500
    assert consumers.now.overdue(CHECKED_WITHIN_MS + 50, is_done) == []
    assert consumers.now.quiet_ms(CHECKED_WITHIN_MS + 50) == QUIET_MS


def test_served_consumer_goes_behind_its_group():
    consumers = Consumers()
    subscription, other = consumers.joined("a"), consumers.joined("b")
    first, second, last = (consumers.waits(waiter, 500) for waiter in (subscription, subscription, other))
    assert consumers.now.waiting_in("s", "g") == consumers.now.all_waiting() == [subscription, other]
    assert consumers.now.take_waiting(subscription) is first and consumers.now.waiting_in("s", "g") == [
        other,
        subscription,
    ]
    assert consumers.now.take_waiting(other) is last and consumers.now.waiting_in("s", "g") == [subscription]
    consumers.now.give_up(subscription, second)
    assert consumers.now.waiting_in("s", "g") == consumers.now.groups_waiting_on("s") == []


# Requeued messages.


def test_group_is_due_once_with_its_first_message():
    consumers = Consumers()
    for group, due_ms in (("g", 500), ("g", 500), ("g", 900), ("other", None), ("other", 0), ("other", NOT_BEGUN)):
        consumers.now.note_due("s", group, due_ms)
    assert len(consumers.now._due) == 1, "however much of it waits"
    consumers.now.note_due("s", "g", 300)
    consumers.now.note_due("gone", "g", 400)
    assert consumers.now.due_in_ms(0) == 300 and consumers.now.due(299) == []
    assert consumers.now.due(300) == ["s"] and consumers.now.due(400) == ["gone"]
    assert consumers.now.due(900) == [] and consumers.now.due_in_ms(900) == QUIET_MS


def test_later_due_time_is_noted_next():
    consumers = Consumers()
    requeued = consumers.state.groups["s", "g"].requeued
    for first, due_ms in ((0, 2_048_100), (2, 2_048_300), (4, 9_000_000)):
        requeued.add(RequeuedRange(first, 1, 1, due_ms))
        consumers.now.note_due("s", "g", due_ms)
    assert consumers.now.due_in_ms(2_048_000) == 100 and consumers.now.due_in_ms(2_048_200) == 0
    assert consumers.now.due(2_048_100) == ["s"] and consumers.now.due_in_ms(2_048_100) == 200
    assert consumers.now.due(2_048_300) == ["s"] and consumers.now.due_in_ms(2_048_300) == QUIET_MS


# Departures.


@pytest.mark.parametrize(
    ("begins", "begun_none", "expected"),
    [
        (True, True, [(Departure.NONE_BEGUN, 0, 0)]),
        (False, True, [(Departure.NONE_BEGUN, 0, 0)]),
        (False, False, [(Departure.VANISHED, 0, 0)]),
        (True, False, [(Departure.SUSPECTED, 0, 0), (3, 5, 0), (8, 9, 0)]),
    ],
)
def test_departure_uses_reports_and_forgets_them(begins, begun_none, expected):
    consumers = Consumers()
    subscription = consumers.joined(begins=begins)
    consumers.now.note_reporting(subscription)
    consumers.has("c", (0, 5), (8, 12))
    for begun in ([(3, 6)], [(8, 9), (20, 30)]):
        consumers.now.begin(subscription, begun)
    assert consumers.now.departure(KEY, begun_none=begun_none) == expected
    assert consumers.now.departure(KEY, begun_none=False) == [(Departure.SUSPECTED, 0, 0)]


def test_skipped_messages_are_counted_by_group():
    consumers = Consumers()
    for group, messages in (("g", 2), ("h", 5), ("g", 3)):
        consumers.now.note_skipped("s", group, messages)
    assert consumers.now.skipped == {("s", "g"): 5, ("s", "h"): 5}


def test_settled_messages_leave_the_begin_reports():
    consumers = Consumers()
    subscription = consumers.joined()
    for pull in range(0, 1_000, 10):
        consumers.has("c", (pull, pull + 2), (pull + 4, pull + 5))
        consumers.now.begin(subscription, [(pull, pull + 1)])
    assert consumers.now._begun == {KEY: [(990, 991)]}
    consumers.now.begin(subscription, [(994, 995)])
    assert consumers.now.departure(KEY, begun_none=False) == [(Departure.SUSPECTED, 0, 0), (990, 991, 0), (994, 995, 0)]
