"""Core. Delivery by a master: order, leases, acks, returning consumers."""

from __future__ import annotations

import json

import pytest

from qmq.broker import choice, delivery, serving
from qmq.errors import CorruptFrame, ErrorCode
from qmq.log.frame import FrameKind
from qmq.log.progress_frame import PASSED
from qmq.replication.readonly import Reason
from tests.unit.broker.world import Client, Group, a_group

KEY = ("s", "g")
SIX = [f"m{number}" for number in range(6)]


def stored(count: int, **settings) -> tuple[Group, Client]:
    """Return a group with messages m0, m1, …, each in its own frame, and a consumer."""
    group, client = a_group(**settings)
    for number in range(count):
        client.store(f"m{number}")
    client.join()
    return group, client


def drop_before(group: Group, sequence: int) -> None:
    """Let retention delete the messages before this one."""
    group.a.log.state.kept.start = group.a.log.frames("s", sequence, 1)[0].offset


# Pulls.


def test_pull_reads_only_old_messages_from_disk():
    group, client = a_group(tail_bytes=0)
    client.store("old")
    client.produce("of another subject", subject="other")
    client.join()
    client.produce("new, not written yet")
    pull = client.pull()
    group.a.host.do_read()
    group.settle()
    assert client.ids(pull) == ["old", "new, not written yet"] and group.a.node.writable


def test_pull_is_bounded_by_the_broker(monkeypatch):
    monkeypatch.setattr(choice, "PULL_BYTES_MAX", 500)
    monkeypatch.setattr(choice, "PULL_MESSAGES_MAX", 3)
    _, client = a_group()
    for number in range(2):
        client.produce(f"m{number}", size=300)
    client.produce(*(f"n{number}" for number in range(8)))
    client.join()
    assert [len(client.take(most=100, bytes_max=1 << 20)) for _ in range(4)] == [1, 1, 3, 3]


def test_pull_for_no_messages_is_refused():
    _, client = a_group()
    client.join()
    assert client.code(client.pull(most=0, timeout_ms=60_000)) == ErrorCode.INVALID_REQUEST
    assert client.store("m0"), "commits continue"


@pytest.mark.parametrize("way", ["ack", "dead", "later"])
def test_consumer_below_its_unacked_limit_gets_messages(way, monkeypatch):
    for module in (choice, delivery):
        monkeypatch.setattr(module, "UNACKED_MESSAGES_MAX", 2)
    group, client = stored(3)
    assert client.take(most=2) == ["m0", "m1"]
    first, waiting = client.first, client.pull(timeout_ms=60_000)
    group.settle()
    assert not client.answered(waiting)
    if way == "ack":
        client.done(client.ack(first, first + 1))
    else:
        client.done(client.nack(first, first + 1, dead=way == "dead", delay_ms=0 if way == "dead" else 60_000))
    assert client.ids(waiting) == ["m2"]


def test_damage_found_while_choosing_is_reported(monkeypatch):
    group, client = stored(1, tail_bytes=0)
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.flip(ref.offset)

    def fails(*_, **more):
        raise CorruptFrame(ref.offset, "an index had to be made again")

    monkeypatch.setattr(serving, "choose", fails)
    client.pull(timeout_ms=60_000)
    assert group.a.log.damage is not None and not group.a.node.writable


# Without the slave.


def test_master_alone_delivers_below_the_high_watermark():
    """P3: progress is on one disk and each answer is marked; messages of the master alone are not delivered."""
    group, client = a_group()
    client.produce("safe 0", "safe 1")
    client.join()
    client.produce("on one disk")
    group.a.host.settle()
    group.cut()
    assert client.take(most=1) == ["safe 0"] and client.flags(client.last_pull) == {1}
    client.acked("safe 0")
    assert client.take() == ["safe 1"] and client.take() == []
    waiting = client.pull(timeout_ms=60_000)
    group.agree()
    assert client.ids(waiting) == ["on one disk"] and client.flags(waiting) == {0}


def test_pull_under_way_returns_when_the_slave_is_lost():
    group, client = a_group()
    client.produce("safe")
    client.join()
    client.produce("unsafe")
    mixed = client.pull(timeout_ms=60_000)
    group.a.host.turn()
    group.cut()
    assert client.outcome(mixed) == ErrorCode.NOT_SERVED
    (subscription,) = group.a.master.subscriptions
    assert subscription.in_flight == client.link.owed_bytes == 0 and not subscription.owed
    assert client.take(timeout_ms=60_000) == ["safe"], "both copies have it"


def test_messages_waiting_for_the_slave_precede_dead_letters():
    group, client = a_group()
    client.produce("poison")
    client.join(deliveries_max=1)
    assert client.take() == ["poison"]
    first = client.first
    client.store("safe")
    client.produce("on one disk")
    refused = client.pull(timeout_ms=60_000)
    client.nack(first, first + 1)
    group.a.host.turn()
    group.cut()
    assert client.outcome(refused) == ErrorCode.NOT_SERVED
    safe, waiting = client.pull(timeout_ms=60_000), client.pull(timeout_ms=60_000)
    group.a.host.settle()
    assert client.ids(safe) == ["safe"] and not client.answered(waiting)
    group.agree()
    assert client.ids(waiting) == ["on one disk"]


@pytest.mark.parametrize(("why", "code"), [("swap", ErrorCode.NOT_SERVED), ("fenced", ErrorCode.NOT_MASTER)])
def test_stopped_master_refuses_consumers(why, code):
    group, client = stored(2)
    client.take(most=1)
    first = client.first
    if why == "swap":
        group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    else:
        group.a.master.readonly.change(Reason.FENCED, True)
    end = group.a.log.end
    refused = [
        client.subscribe("other", group="new"),
        client.pull(timeout_ms=60_000),
        client.ack(first, first + 1),
        client.nack(first, first + 1),
        client.leave(),
    ]
    assert [client.code(opaque) for opaque in refused] == [code] * 5 and group.a.log.end == end


# Leases and departures.


@pytest.mark.parametrize("way", ["lease", "unsubscribe"])
def test_messages_of_a_consumer_that_went_away_reach_the_others(way):
    """W1: requeued by the end of its lease, or at once when it unsubscribes; acked messages do not return."""
    group, producer = a_group(lease_ms=1_000)
    producer.produce(*SIX)
    gone, stays = group.subscribed("gone"), group.subscribed("stays")
    assert gone.take(most=4) == SIX[:4]
    gone.acked("m0")
    assert stays.take(most=2) == SIX[4:]
    waiting = stays.pull(timeout_ms=60_000)
    if way == "lease":
        gone.lost()
        group.wait(900)
        stays.heartbeat()
        group.wait(100)
        assert not stays.answered(waiting)
        group.wait(1)
    else:
        gone.done(gone.leave())
    assert stays.ids(waiting) == ["m1", "m2", "m3"]


def test_unsubscribe_is_answered_once_both_copies_have_it():
    group, client = stored(1)
    client.take()
    opaque = client.leave()
    group.a.host.settle()
    assert not client.answered(opaque)
    group.settle()
    assert client.body(opaque) == b"" and not group.b.log.state.groups[KEY].consumers


def test_unsubscribed_consumer_has_no_subscription_or_lease():
    group, client = stored(1)
    quiet = client.join(subject="quiet")
    waiting = client.pull(quiet, timeout_ms=60_000)
    client.leave(quiet)
    assert client.code(waiting) == ErrorCode.NO_MESSAGE
    left, again = client.leave(1), client.leave(1)
    assert client.code(left) == ErrorCode.SUCCESS, "the log has nothing of it: nothing is written"
    assert client.code(again) == client.code(client.pull(1)) == ErrorCode.UNKNOWN_SUBSCRIPTION
    assert not group.a.master._delivery.consumption._seen


def test_paused_master_ends_no_lease():
    group, producer = a_group(lease_ms=1_000)
    producer.produce("m0", "m1")
    alive, gone = group.subscribed("alive"), group.subscribed("gone")
    assert alive.take(most=1) == ["m0"] and gone.take(most=1) == ["m1"]
    group.a.stand_still(60_000)
    group.settle()
    assert set(group.progress.consumers) == {"alive", "gone"}
    alive.heartbeat()
    group.wait(751)
    assert set(group.progress.consumers) == {"alive"}
    for _ in range(5):
        group.a.stand_still(20_000)
    assert not group.progress.consumers, "leases end although every tick is late"


def test_waiting_pull_ends_with_the_lease():
    """Messages of a consumer without a lease would never be requeued."""
    group, producer = a_group(lease_ms=1_000)
    silent = group.subscribed("silent")
    waiting = silent.pull(timeout_ms=60_000)
    group.a.wait(1_001)
    assert silent.code(waiting) == ErrorCode.INVALID_ACK
    assert silent.text(waiting) == "no packet arrived from silent for a lease, 1 s; subscribe again"
    producer.produce("m")
    assert group.subscribed("other").take() == ["m"]


@pytest.mark.parametrize("change", ["departure", "swap", "restart"])
def test_late_ack_never_hits_other_messages(change):
    """W2, W13: an ack of an earlier process names pull sequences without messages."""
    group, producer = a_group(lease_ms=1_000)
    producer.produce("m0", "m1")
    client = group.subscribed("c")
    assert client.take(most=1) == ["m0"]
    old = client.first
    match change:
        case "departure":
            client.lost()
            group.a.wait(1_001)
        case "swap":
            group.swap(2)
        case "restart":
            group.cut()
            group.a.crash()
            group.start()
    group.settle()
    client = group.subscribed("c", held_end=0 if change == "departure" else old + 1)
    assert client.take(most=1) == ["m0" if change == "departure" else "m1"]
    new = client.first
    assert new > old
    assert client.outcome(client.ack(old, old + 1)) in (ErrorCode.SUCCESS, ErrorCode.INVALID_ACK)
    assert [unacked.pull for unacked in group.progress.consumers["c"].unacked] == [new]
    for begin, end in ((new + 1, new + 2), (new, new), (new, new + 9)):
        assert client.code(client.ack(begin, end)) == ErrorCode.INVALID_ACK
    client.done(client.ack(new, new + 1))
    assert not group.progress.consumers["c"].unacked


# Returning consumers.


def test_returning_consumer_gets_its_unacked_messages_unchanged():
    group, producer = a_group()
    producer.produce(*SIX)
    client = group.subscribed("c")
    assert client.take(most=5) == SIX[:5]
    given = {id: (number, sequence) for number, sequence, id in client.pulled(client.last_pull)}
    first = client.first
    client.acked("m0", "m3")
    end = group.a.log.end
    for held_end, expected in ((0, "124"), (first + 2, "24"), (first + 5, "")):
        again = group.subscribed("c", held_end=held_end, is_new=False)
        pull = again.pull(most=len(expected))
        group.settle()
        if expected:
            got = {id: (number, sequence) for number, sequence, id in again.pulled(pull)}
            assert got == {f"m{i}": given[f"m{i}"] for i in expected}
    assert group.a.log.end == end, "its progress is written already"
    assert again.take() == ["m5"], "new messages come after them"


def test_subscribe_answer_lists_unacked_ranges():
    """Acks confirmed by a master alone may be missing at its successor: they must be sent again."""
    group, client = a_group()
    client.produce(*SIX)
    terms = {"lease_ms": 30_000, "begins": True, "expires": True, "worn_out": True}
    empty = {"subscription": 1, "acked_end": 0, "unacked": [], **terms}
    assert json.loads(client.done(client.subscribe())) == empty
    client.take(most=5)
    first = client.first
    client.acked("m0", "m2")
    client.take()
    answer = json.loads(client.done(client.subscribe(held_end=first + 5, is_new=False)))
    unacked = [[first + 1, first + 2], [first + 3, first + 5]]
    assert answer == {"subscription": 2, "acked_end": first + 1, "unacked": unacked, **terms}


@pytest.mark.parametrize("who", ["broadcast", "other", "idle", "unacked"])
def test_subscribe_without_a_change_writes_nothing(who):
    group, client = stored(2)
    client.join("host1", group="host1", broadcast=True)
    client.take(subscription=1)
    first = client.first
    if who != "unacked":
        client.done(client.ack(first, first + 2, subscription=1))
    end, again = group.a.log.end, group.client("again")
    match who:
        case "broadcast":
            again.join("host1", group="host1", broadcast=True)
        case "other":
            again.join("c2")
        case "idle":
            again.join("c1")
        case "unacked":
            again.join("c1", held_end=first + 2)
    assert group.a.log.end == end


def test_failed_begin_of_a_group_subscribes_no_consumer():
    group, client = a_group(tail_bytes=0)
    for number in range(3):
        client.store(f"m{number}")
    group.a.flip(group.a.log.frames("s", 1, 1)[0].offset)
    assert client.code(client.subscribe(start="since", since_ms=1)) == ErrorCode.NOT_SERVED
    assert group.a.log.damage is not None
    assert client.code(client.pull(1, timeout_ms=60_000)) == ErrorCode.UNKNOWN_SUBSCRIPTION


# Deleted messages.


def test_deleted_new_messages_are_passed_and_counted():
    group, client = stored(5)
    assert client.take(most=1) == ["m0"]
    first = client.first
    drop_before(group, 3)
    assert client.take() == ["m3", "m4"] and group.a.master.skipped == {KEY: 2}
    *_, (_, pull) = group.frames(FrameKind.PULL)
    assert pull.entries == ((PASSED, 1, 2), (first + 1, 3, 2))


def test_deleted_unacked_messages_count_once():
    group, client = stored(4)
    assert len(client.take()) == 4 and group.a.master.skipped == {}
    client.acked("m0")
    drop_before(group, 2)
    for _ in range(2):
        assert group.subscribed("c1", is_new=False).take() == ["m2", "m3"]
        assert group.progress.consumers["c1"].unacked_messages == 2
        assert group.a.master.skipped == {KEY: 1}
    assert group.b.log.state.groups[KEY].consumers["c1"].unacked_messages == 2
    group.a.log.state.kept.start = group.a.log.end
    assert group.subscribed("c1", is_new=False).take() == []
    assert not group.progress.consumers["c1"].unacked and group.a.master.skipped == {KEY: 3}


def test_deleted_requeued_messages_are_skipped():
    group, client = stored(4)
    client.take()
    client.nacked("m0")
    drop_before(group, 3)
    assert client.take() == [] and group.a.master.skipped == {KEY: 1}
    assert not group.progress.requeued and group.progress == group.b.log.state.groups[KEY]
