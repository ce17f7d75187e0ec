"""Core. Delivery by a master: order, leases, acks."""

from __future__ import annotations

import json

import pytest

from qmq.broker import choice, delivery, serving
from qmq.errors import CorruptFrame, ErrorCode
from qmq.log.frame import NO_CHAIN, FrameKind, decode_frames
from qmq.log.progress_frame import PASSED, decode_progress
from qmq.log.segments import log_name
from qmq.replication.readonly import Reason
from tests.unit.broker.world import a_group


def test_message_larger_than_a_pull_comes_alone_and_the_next_ones_follow_in_order():
    group, client = a_group()
    client.produce("big", size=900)
    client.produce("small 1")
    client.produce("small 2")
    client.join()
    first = client.pull(bytes_max=100)
    second = client.pull(bytes_max=0)
    third = client.pull(bytes_max=1 << 20)
    group.settle()
    assert [client.ids(pull) for pull in (first, second, third)] == [["big"], ["small 1"], ["small 2"]]
    sequences = [entry[0] for pull in (first, second, third) for entry in client.pulled(pull)]
    assert sequences == list(range(sequences[0], sequences[0] + 3))


def test_pull_of_old_and_brand_new_messages_reads_only_the_old_ones_from_disk():
    group, client = a_group(tail_bytes=0)
    client.store("old")
    client.produce("of another subject", subject="other")
    client.join()
    client.produce("new, not written yet")
    pull = client.pull()
    group.a.host.do_read()
    group.settle()
    assert client.ids(pull) == ["old", "new, not written yet"]
    assert group.a.node.writable


def test_pull_that_waits_is_answered_when_its_subscription_ends():
    group, client = a_group()
    client.join()
    pull = client.pull(timeout_ms=10_000)
    client.leave()
    assert client.code(pull) == ErrorCode.NO_MESSAGE


def test_pull_that_waits_learns_that_another_connection_took_its_consumer_id():
    group, client = a_group()
    client.join()
    waiting = client.pull(timeout_ms=10_000)
    group.client("another").subscribe()
    later = client.pull()
    assert client.code(waiting) == client.code(later) == ErrorCode.SUBSCRIPTION_REPLACED


def test_pull_that_finds_nothing_is_answered_at_its_deadline():
    group, client = a_group()
    client.join()
    now, later = client.pull(timeout_ms=0), client.pull(timeout_ms=300)
    assert client.code(now) == ErrorCode.NO_MESSAGE and not client.answered(later)
    group.a.wait(299)
    assert not client.answered(later)
    group.a.wait(1)
    assert client.code(later) == ErrorCode.NO_MESSAGE


def test_one_pull_that_waits_blocks_no_other():
    group, client = a_group()
    client.subscribe(subject="quiet")
    client.subscribe(subject="s", group="slow")
    client.join(subject="s", group="other")
    quiet, one = client.pull(1, timeout_ms=60_000), client.pull(2, timeout_ms=60_000)
    client.store("m")
    assert client.ids(one) == ["m"] and not client.answered(quiet)
    assert client.take(3) == ["m"]


def test_messages_of_a_consumer_that_went_away_reach_the_others():
    """W1: requeued by the end of its lease, or at once when it unsubscribes; acked messages do not return."""
    for way in ("lease", "unsubscribe"):
        group, producer = a_group(lease_ms=1_000)
        producer.produce(*[f"m{i}" for i in range(6)])
        gone, stays = group.subscribed("gone"), group.subscribed("stays")
        assert gone.take(most=4) == ["m0", "m1", "m2", "m3"]
        first = gone.first
        gone.done(gone.ack(first, first + 1))
        if way == "lease":
            gone.lost()
            group.a.wait(900)
            assert stays.take(most=2, timeout_ms=60_000) == ["m4", "m5"]
            waiting = stays.pull(timeout_ms=60_000)
            group.a.wait(101)
        else:
            waiting = stays.pull(most=2, timeout_ms=60_000)
            group.settle()
            waiting = stays.pull(timeout_ms=60_000)
            gone.leave()
        group.settle()
        assert stays.ids(waiting) == ["m1", "m2", "m3"]


def test_consumer_that_shows_itself_keeps_its_messages():
    group, producer = a_group(lease_ms=1_000)
    producer.produce("m")
    busy = group.subscribed("busy")
    busy.take()
    for _ in range(10):
        group.a.wait(900)
        assert busy.body(busy.heartbeat()) == b""
        group.settle()
    held = group.a.log.state.groups["s", "g"].consumers["busy"]
    assert held.unacked_messages == 1


def test_paused_master_ends_no_lease():
    group, producer = a_group(lease_ms=1_000)
    producer.produce("m0", "m1")
    lives, gone = group.subscribed("lives"), group.subscribed("gone")
    assert lives.take(most=1) == ["m0"] and gone.take(most=1) == ["m1"]
    group.a.stand_still(60_000)
    group.settle()
    assert set(group.a.log.state.groups["s", "g"].consumers) == {"lives", "gone"}
    lives.heartbeat()
    group.wait(751)
    assert set(group.a.log.state.groups["s", "g"].consumers) == {"lives"}, "who is gone goes a moment later"


def test_leases_end_on_a_master_whose_every_turn_takes_long():
    group, producer = a_group(lease_ms=1_000)
    producer.produce("m")
    group.subscribed("gone").take()
    for _ in range(5):
        group.a.stand_still(20_000)
    assert not group.a.log.state.groups["s", "g"].consumers


def test_ack_after_the_lease_ended_is_refused():
    """Its pull sequences were requeued, even if the consumer, still connected, got others since."""
    group, producer = a_group(lease_ms=1_000)
    producer.produce("m0", "m1")
    late = group.subscribed("late")
    assert late.take(most=1) == ["m0"]
    old = late.first
    group.a.wait(1_001)
    next_pull, ack = late.pull(), late.ack(old, old + 1)
    group.settle()
    assert late.code(next_pull) == late.code(ack) == ErrorCode.UNKNOWN_SUBSCRIPTION
    assert late.outcome(late.subscribe("late", held_end=old + 1)) == ErrorCode.INVALID_ACK
    assert group.subscribed("other").take() == ["m0", "m1"]


def test_pull_of_a_silent_consumer_gets_nothing_after_its_lease():
    """No lease would ever requeue it."""
    group, producer = a_group(lease_ms=1_000)
    silent = group.subscribed("silent")
    waiting = silent.pull(timeout_ms=60_000)
    group.settle()
    group.a.wait(1_001)
    assert silent.code(waiting) == ErrorCode.INVALID_ACK
    assert silent.text(waiting) == "nothing came from silent for a lease, 1 s; begin anew"
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
    if change == "departure":
        client.lost()
        group.a.wait(1_001)
    elif change == "swap":
        group.swap(2)
    else:
        group.cut()
        group.a.crash()
        group.start()
    group.settle()
    client = group.subscribed("c", held_end=0 if change == "departure" else old + 1)
    assert client.take(most=1) == ["m0" if change == "departure" else "m1"]
    new = client.first
    assert new > old
    late = client.ack(old, old + 1)
    group.settle()
    held = group.a.log.state.groups["s", "g"].consumers["c"].unacked
    assert [entry[0] for entry in held] == [new], "the late ack took what it meant, or nothing"
    assert client.link.answers[late][0] in (0, ErrorCode.INVALID_ACK)
    for begin, end in ((new + 1, new + 2), (new, new), (new, new + 9)):
        assert client.code(client.ack(begin, end)) == ErrorCode.INVALID_ACK
    client.done(client.ack(new, new + 1))
    assert not group.a.log.state.groups["s", "g"].consumers["c"].unacked


def test_returning_consumer_gets_lost_messages_first():
    group, producer = a_group()
    producer.produce(*[f"m{i}" for i in range(6)])
    client = group.subscribed("c")
    assert client.take(most=4) == ["m0", "m1", "m2", "m3"]
    first = client.first
    client.lost()
    again = group.subscribed("c", held_end=first + 2)
    end = group.a.log.end
    assert again.take(most=10) == ["m2", "m3"] and group.a.log.end == end, "it is written down already"
    assert again.take(most=10) == ["m4", "m5"]
    fresh = group.subscribed("c", held_end=0)
    assert fresh.take(most=10) == [f"m{i}" for i in range(6)]


def test_consumer_that_comes_back_gets_each_message_under_its_number():
    group, producer = a_group()
    producer.produce(*[f"m{i}" for i in range(6)])
    client = group.subscribed("c")
    assert len(client.take()) == 6
    given = {id: (number, sequence) for number, sequence, id in client.pulled(client.opaque)}
    first = given["m0"][0]
    client.ack_ranges((first, first + 1), (first + 3, first + 4))
    for held_end, expected in ((0, "1245"), (first + 2, "245"), (first + 5, "5")):
        again = group.subscribed("c", held_end=held_end, is_new=False)
        opaque = again.pull()
        group.settle()
        got = {id: (number, sequence) for number, sequence, id in again.pulled(opaque)}
        assert got == {f"m{i}": given[f"m{i}"] for i in expected}


def test_a_pull_gets_no_more_than_a_broker_gives_at_once(monkeypatch):
    monkeypatch.setattr(choice, "PULL_BYTES_MAX", 500)
    monkeypatch.setattr(choice, "PULL_MESSAGES_MAX", 3)
    group, client = a_group()
    for number in range(2):
        client.produce(f"m{number}", size=300)
    client.produce("n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7")
    client.join()
    pulls = [client.pull(most=100, bytes_max=1 << 20) for _ in range(4)]
    group.settle()
    assert [len(client.ids(pull)) for pull in pulls] == [1, 1, 3, 3]


def test_messages_deleted_before_the_group_came_are_counted():
    group, client = a_group()
    for number in range(5):
        client.store(f"m{number}")
    client.join()
    assert client.take(most=1) == ["m0"]
    first = client.first
    group.a.log.state.kept.start = group.a.log.frames("s", 3, 1)[0].offset
    assert client.take() == ["m3", "m4"] and group.a.master.skipped == {("s", "g"): 2}
    frames = decode_frames(group.a.log.stored.read_bytes(0, group.a.log.end), 0, NO_CHAIN)
    *_, said = [decode_progress(body) for frame, body in frames if frame.kind == FrameKind.PULL]
    assert said.entries == ((PASSED, 1, 2), (first + 1, 3, 2))


def test_master_alone_delivers_below_the_high_watermark():
    """P3: progress is on one disk and each answer is marked; messages of the master alone are not delivered."""
    group, client = a_group()
    client.produce("safe 0", "safe 1")
    client.join()
    client.produce("on one disk")
    group.a.host.settle()
    group.cut()
    first = client.pull(most=1)
    group.a.host.settle()
    assert client.ids(first) == ["safe 0"] and client.flags(first) == {1}
    begin = client.pulled(first)[0][0]
    acked = client.ack(begin, begin + 1)
    group.a.host.settle()
    assert client.link.answers[acked][0] == 0
    rest, nothing = client.pull(), client.pull()
    group.a.host.settle()
    assert client.ids(rest) == ["safe 1"] and client.code(nothing) == ErrorCode.NO_MESSAGE
    waiting = client.pull(timeout_ms=60_000)
    group.connect()
    group.settle()
    assert client.ids(waiting) == ["on one disk"] and client.flags(waiting) == {0}


def test_pulls_of_one_subscription_are_bounded():
    group, client = a_group()
    client.join()
    pulls = [client.pull(timeout_ms=60_000) for _ in range(66)]
    refused = [pull for pull in pulls if client.answered(pull)]
    assert refused == pulls[64:] and {client.code(pull) for pull in refused} == {ErrorCode.OVERLOADED}


def test_consumer_at_its_limit_of_unacked_messages_goes_on_when_it_acks(monkeypatch):
    for module in (choice, delivery):
        monkeypatch.setattr(module, "UNACKED_MESSAGES_MAX", 2)
    group, client = a_group()
    client.produce("m0", "m1", "m2")
    client.join()
    assert client.take(most=2) == ["m0", "m1"]
    first = client.first
    waiting = client.pull(timeout_ms=60_000)
    group.settle()
    assert not client.answered(waiting)
    client.done(client.ack(first, first + 1))
    assert client.ids(waiting) == ["m2"]


def test_longest_waiting_pull_is_served_first():
    group, producer = a_group()
    first, second = group.subscribed("first"), group.subscribed("second")
    turns = []
    pulls = [(name, client, client.pull(most=1, timeout_ms=60_000)) for name, client in (("1", first), ("2", second))]
    for i in range(4):
        producer.store(f"m{i}")
        for name, client, pull in list(pulls):
            if client.answered(pull):
                turns.append(name)
                pulls.remove((name, client, pull))
                pulls.append((name, client, client.pull(most=1, timeout_ms=60_000)))
    assert turns == ["1", "2", "1", "2"]


@pytest.mark.parametrize("way", ["dead", "later"])
def test_consumer_at_its_limit_of_unacked_messages_goes_on_when_it_gives_one_back(way, monkeypatch):
    for module in (choice, delivery):
        monkeypatch.setattr(module, "UNACKED_MESSAGES_MAX", 2)
    group, client = a_group()
    client.produce("m0", "m1", "m2")
    client.join()
    client.take(most=2)
    first = client.first
    waiting = client.pull(timeout_ms=60_000)
    client.done(client.nack(first, first + 1, dead=way == "dead", delay_ms=0 if way == "dead" else 60_000))
    assert client.ids(waiting) == ["m2"]


def test_subscribe_answer_lists_unacked_messages():
    group, client = a_group()
    client.produce(*[f"m{i}" for i in range(4)])
    first = client.subscribe()
    group.settle()
    terms = {"lease_ms": 30_000, "begins": True, "expires": True}
    assert json.loads(client.body(first)) == {"subscription": 1, "acked_end": 0, "unacked": [], **terms}
    client.take()
    begin = client.first
    client.ack(begin, begin + 1)
    again = client.subscribe(held_end=begin + 3, is_new=False)
    group.settle()
    expected = {"subscription": 2, "acked_end": begin + 1, "unacked": [[begin + 1, begin + 3]], **terms}
    assert json.loads(client.body(again)) == expected


@pytest.mark.parametrize("what", ["subscribe", "pull", "ack", "nack", "unsubscribe"])
@pytest.mark.parametrize(("why", "code"), [("swap", ErrorCode.NOT_SERVED), ("fenced", ErrorCode.NOT_MASTER)])
def test_nothing_of_consumers_is_done_by_a_master_that_may_not(what, why, code):
    group, client = a_group()
    client.produce("m0", "m1")
    client.join()
    client.take(most=1)
    begin = client.first
    if why == "swap":
        group.a.node.changes.prepare_swap(1, hold_ms=1_000)
    else:
        group.a.master.readonly.change(Reason.FENCED, True)
    end = group.a.log.end
    send = {
        "subscribe": lambda: client.subscribe("other", group="new"),
        "pull": lambda: client.pull(timeout_ms=60_000),
        "ack": lambda: client.ack(begin, begin + 1),
        "nack": lambda: client.nack(begin, begin + 1),
        "unsubscribe": lambda: client.leave(),
    }
    refused = send[what]()
    assert client.code(refused) == code and group.a.log.end == end


def test_pull_is_refused_after_its_consumer_unsubscribed():
    group, client = a_group()
    client.produce("m0")
    client.join()
    for _ in range(2):
        client.leave()
    assert client.code(client.opaque - 1) == ErrorCode.SUCCESS, "the log knows nothing of it: there is nothing to write"
    assert client.code(client.opaque) == client.code(client.pull()) == ErrorCode.UNKNOWN_SUBSCRIPTION
    assert not group.a.master._delivery.consumption._seen, "its lease is over"


def test_unsubscribe_is_answered_once_both_copies_have_it():
    group, client = a_group()
    client.produce("m0")
    client.join()
    client.take()
    opaque = client.leave()
    group.a.host.settle()
    assert not client.answered(opaque)
    group.settle()
    assert client.body(opaque) == b"" and not group.b.log.state.groups["s", "g"].consumers


def test_unacked_messages_deleted_by_retention_count_once():
    group, client = a_group()
    for number in range(4):
        client.store(f"m{number}")
    client.join()
    assert len(client.take()) == 4 and group.a.master.skipped == {}
    first = client.first
    client.ack(first, first + 1)
    group.a.log.state.kept.start = group.a.log.frames("s", 2, 1)[0].offset
    for _ in range(2):
        again = group.subscribed("c1", is_new=False)
        assert again.take() == ["m2", "m3"]
        assert group.a.log.state.groups["s", "g"].consumers["c1"].unacked_messages == 2
        assert group.a.master.skipped == {("s", "g"): 1}
    assert group.b.log.state.groups["s", "g"].consumers["c1"].unacked_messages == 2


def test_damage_found_while_choosing_is_reported(monkeypatch):
    group, client = a_group(tail_bytes=0)
    client.produce("m0")
    client.join()
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.disk.flip(log_name(0), 8 * ref.offset)

    def fails(*_, **more):
        raise CorruptFrame(ref.offset, "an index had to be made again")

    monkeypatch.setattr(serving, "choose", fails)
    client.pull(timeout_ms=60_000)
    assert group.a.log.damage is not None and not group.a.node.writable


def test_consumer_whose_messages_were_all_deleted_continues():
    group, client = a_group()
    client.produce("m0")
    client.join()
    assert client.take() == ["m0"]
    group.a.log.state.kept.start = group.a.log.end
    assert group.subscribed("c1", is_new=False).take() == []
    assert not group.a.log.state.groups["s", "g"].consumers["c1"].unacked and group.a.master.skipped == {("s", "g"): 1}


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
    group.a.host.settle()
    assert client.code(refused) == ErrorCode.NOT_SERVED
    safe, waiting = client.pull(timeout_ms=60_000), client.pull(timeout_ms=60_000)
    group.a.host.settle()
    assert client.ids(safe) == ["safe"] and not client.answered(waiting)
    group.connect()
    group.settle()
    assert client.ids(waiting) == ["on one disk"]


def test_requeued_messages_deleted_by_retention_are_skipped():
    group, client = a_group()
    for number in range(4):
        client.store(f"m{number}")
    client.join()
    client.take()
    first = client.first
    client.done(client.nack(first, first + 1))
    group.a.log.state.kept.start = group.a.log.frames("s", 3, 1)[0].offset
    assert client.take() == [] and group.a.master.skipped == {("s", "g"): 1}
    assert not group.a.log.state.groups["s", "g"].requeued
    assert group.a.log.state.groups["s", "g"] == group.b.log.state.groups["s", "g"]
