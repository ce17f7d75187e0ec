"""Core. Retries: requeued messages are due later, counted, given to any consumer, and block no others."""

from __future__ import annotations

import pytest

from qmq.broker import group_status
from qmq.errors import ErrorCode
from qmq.log.frame import FrameKind, decode_frames
from qmq.log.group import UnackedRange
from qmq.log.progress_frame import Departure, decode_progress
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.remoting import commands
from qmq.remoting.commands import Command, Nack, NackEntry, Verdict
from tests.unit.broker.world import Client, Group


def a_group(*ids: str, **settings) -> tuple[Group, Client]:
    """Group with these messages in one batch, and a subscribed consumer."""
    group = Group.made(**settings).start()
    client = group.client()
    if ids:
        client.produce(*ids)
    client.join()
    return group, client


def pulled(group: Group, client: Client, **terms) -> list[tuple[int, int, str]]:
    opaque = client.pull(**terms)
    group.settle()
    return client.pulled(opaque) if client.link.answers[opaque][0] == 0 else []


def ids(group: Group, client: Client, **terms) -> list[str]:
    return [id for _, _, id in pulled(group, client, **terms)]


def test_nacked_message_comes_again_after_its_delay_and_not_before():
    group, client = a_group("m0", "m1")
    client.take()
    first = client.first
    client.done(client.nack(first, first + 1, delay_ms=5_000))
    waiting = client.pull(timeout_ms=60_000)
    group.wait(4_999)
    assert not client.answered(waiting)
    group.wait(1)
    assert client.ids(waiting) == ["m0"], "the pull that waits is answered when it is due"
    assert client.times(waiting) == [2]
    assert client.pulled(waiting)[0][0] > first + 1, "under a number of its own"


def test_retry_that_is_due_wakes_another_consumer_of_the_group():
    group, client = a_group("m0")
    client.take()
    first = client.first
    other = group.client("other")
    waiting = other.pull(other.join("c2"), timeout_ms=60_000)
    client.done(client.nack(first, first + 1))
    assert other.ids(waiting) == ["m0"]


def test_each_delivery_counts_over_consumers_and_swaps():
    """A message that is always abandoned becomes a dead letter (in QMQ it never does)."""
    group, client = a_group("m0")
    client.take()
    first = client.first
    client.done(client.nack(first, first + 1))
    opaque = client.pull()
    group.settle()
    assert client.times(opaque) == [2]
    group.swap(2)
    late = group.client()
    opaque = late.pull(late.join("c1"))
    group.settle()
    assert late.times(opaque) == [3], "a new process under the old name: what the old one began with counts"


def test_return_without_begin_does_not_count():
    group, client = a_group("m0")
    pulled(group, client)
    client.leave()
    client.join()
    opaque = client.pull(client.subscription(client.opaque))
    group.settle()
    assert client.times(opaque) == [1]


def test_consumer_that_falls_silent_has_its_messages_counted_and_given_to_others():
    """W1: QMQ acks and drops them."""
    group, client = a_group("m0", "m1")
    pulled(group, client)
    other = group.client("other")
    waiting = other.pull(other.join("c2"), timeout_ms=120_000)
    client.lost()
    group.a.wait(20_000)
    other.heartbeat()
    group.wait(10_001)
    assert other.ids(waiting) == ["m0", "m1"]
    assert other.times(waiting) == [2, 2]


def test_reconnecting_consumer_keeps_its_messages():
    group, client = a_group("m0", "m1")
    held = pulled(group, client, most=1)
    client.lost()
    again = group.client()
    opaque = again.pull(again.join(held_end=held[-1][0] + 1))
    group.settle()
    assert again.ids(opaque) == ["m1"]
    again.done(again.ack(held[0][0], held[0][0] + 1))
    assert again.body(again.opaque)


def test_ack_in_the_middle_settles_only_that():
    """In QMQ one slow message holds back the acks of all later ones."""
    group, client = a_group("slow", "m1", "m2", "m3")
    client.take()
    first = client.first
    assert (
        commands.decode_acked(
            memoryview(client.done(client.ack_ranges((first + 1, first + 2), (first + 3, first + 4))))
        )
        == first
    ), "everything below is settled"
    client.lost()
    group.a.wait(30_001)
    other = group.client("other")
    other.join("c2")
    assert other.take() == ["slow", "m2"]


def test_ack_or_nack_that_is_repeated_changes_nothing():
    group, client = a_group("m0", "m1", "m2")
    client.take()
    first = client.first
    client.nack(first + 1, first + 2, delay_ms=1_000)
    client.done(client.ack_ranges((first, first + 1)))
    end = group.a.log.end
    opaques = [client.nack(first + 1, first + 2, delay_ms=9_000), client.ack_ranges((first, first + 2))]
    group.settle()
    assert group.a.log.end == end, "nothing was written"
    assert all(commands.decode_acked(memoryview(client.body(opaque))) == first + 2 for opaque in opaques)


@pytest.mark.parametrize("kind", ["ack", "nack", "dead"])
def test_undelivered_messages_cannot_be_settled(kind):
    group, client = a_group("m0", "m1")
    client.take(most=1)
    first = client.first
    send = {
        "ack": lambda: client.ack(first, first + 2),
        "nack": lambda: client.nack(first + 1, first + 2),
        "dead": lambda: client.nack(first, first + 5, dead=True),
    }
    opaque = send[kind]()
    group.settle()
    assert client.code(opaque) == ErrorCode.INVALID_ACK
    assert group.a.log.state.groups["s", "g"].consumers["c1"].unacked == [UnackedRange(first, 0, 1, 1)]


def test_retries_wait_while_new_messages_go_on():
    """A poison message blocks no other."""
    group, client = a_group("poison")
    client.take()
    first = client.first
    client.nack(first, first + 1, delay_ms=60_000)
    client.store("m1")
    assert client.take() == ["m1"]


def test_group_at_the_postpone_limit_gets_new_messages(monkeypatch, caplog):
    """Above 100,000 ranges it got nothing new, up to a day, without a log line."""
    monkeypatch.setattr(group_status, "REQUEUED_RANGES_MAX", 2)
    group, client = a_group("m0", "m1", "m2", "m3", "m4")
    for delay_ms in (1_000, 2_000):  # of different times, so that they do not become one range
        client.take(most=1)
        number = client.first
        client.done(client.nack(number, number + 1, delay_ms=delay_ms))
    first = pulled(group, client)
    assert [id for _, _, id in first] == ["m2", "m3", "m4"], "new ones come"
    third = first[0][0]
    now = NackEntry(third, third + 1, 0, Verdict.RETRY)
    later = NackEntry(third + 1, third + 2, 3_000, Verdict.RETRY)
    for entries in ([later], [now, later]):
        assert (
            client.outcome(client.send(Command.NACK, commands.encode_nack(Nack(client.last_subscription, entries, ""))))
            == ErrorCode.POSTPONES_TOO_MUCH
        ), "it is for a delay group, or its consumer asks again"
    group.a.wait(500)
    said = [record.message for record in caplog.records if "cause=postponed" in record.message]
    assert len(said) == 1 and "subject=s consumer_group=g" in said[0], "said once"
    assert "postponed" in group.a.master.causes.of(("s", "g"))
    assert client.outcome(client.nack(third + 1, third + 2)) == ErrorCode.SUCCESS, "what comes again at once may"
    group.a.wait(1_000)
    assert client.take() == ["m0", "m3"]
    group.settle()
    client.done(client.nack(third, third + 1, delay_ms=3_000))
    assert len(group.a.log.state.groups["s", "g"].requeued) == 2, "there is room again"


@pytest.mark.slow
def test_a_hundred_thousand_postponed_ranges_hold_up_nothing():
    group, client = a_group("m0", "m1")
    client.take(most=1)
    number = client.first
    client.done(client.nack(number, number + 1, delay_ms=1))
    known = group.a.log.state.groups["s", "g"]
    for sequence in range(10, 110_010):
        known.requeued.add(RequeuedRange(sequence, 1, 1, group.a.host.now_ms() + 3_600_000 + sequence))
    assert client.take(most=1) == ["m1"]
    group.a.wait(10)
    assert client.take(most=1) == ["m0"]


def test_nacks_and_their_times_are_the_same_on_the_slave_and_after_a_restart():
    group, client = a_group("m0", "m1", "m2")
    client.take()
    first = client.first
    client.done(client.nack(first + 1, first + 2, delay_ms=7_000))
    due = group.a.host.now_ms() + 7_000
    for broker in (group.a, group.b):
        assert broker.log.state.groups["s", "g"].requeued == Requeued([RequeuedRange(1, 1, 1, due)])
    group.swap(2)
    new = group.client()
    waiting = new.pull(new.join("c2"), timeout_ms=60_000)
    group.wait(7_001)
    assert new.ids(waiting) == ["m1"]


@pytest.mark.parametrize("skew_ms", [-86_400_000, 86_400_000], ids=["behind", "ahead"])
def test_a_clock_that_is_wrong_by_a_day_moves_no_retry(skew_ms):
    """Neither a clock set during the mastership, nor one that differs from the former master's."""
    group, client = a_group("m0", "m1")
    client.take()
    first = client.first
    client.done(client.nack(first, first + 1, delay_ms=5_000))
    group.a.host.wall_skew_ms = skew_ms
    client.done(client.nack(first + 1, first + 2, delay_ms=5_000))
    assert client.take() == []
    group.a.wait(5_000)
    assert client.take() == ["m0", "m1"]
    first = group.a.log.state.groups["s", "g"].consumers["c1"].unacked[0][0]
    client.done(client.nack(first, first + 2, delay_ms=5_000))
    group.b.host.wall_skew_ms = -skew_ms
    group.swap(2)
    new = group.client()
    waiting = new.pull(new.join("c2"), timeout_ms=60_000)
    group.wait(5_001)
    assert new.ids(waiting) == ["m0", "m1"], "never later than its delay"


def test_retries_survive_a_clock_set_back():
    group, client = a_group("m0")
    client.take()
    first = client.first
    client.done(client.nack(first, first + 1, delay_ms=5_000))
    group.a.wait(6_000)  # it is due now, without a consumer
    group.swap(2)
    group.b.host.wall_skew_ms = -4_000
    group.swap(3)
    new = group.client()
    waiting = new.pull(new.join("c2"), timeout_ms=60_000)
    group.settle()
    assert not new.answered(waiting)
    group.wait(3_001)
    assert new.ids(waiting) == ["m0"]


def test_a_new_group_begins_at_a_time():
    group, client = a_group()
    client.store("early")
    group.a.host.clock_ms += 5_000
    since_ms = group.a.host.now_ms()
    client.store("late")
    client.join("c9", group="g9", start="since", since_ms=since_ms)
    assert client.take() == ["late"]


def test_a_broadcast_consumer_that_stays_away_is_forgotten_and_others_are_not():
    """W20: QMQ never removes the progress of one."""
    group, client = a_group("m0", lease_ms=30_000, broadcast_forget_hours=1.0)
    group.clocks_agree()
    client.join("host1", group="host1", broadcast=True)
    assert client.take() == ["m0"]
    client.lost()
    group.wait(7_500, times=500)
    assert list(group.a.log.state.groups) == [("s", "g")]
    assert group.b.log.state.groups.keys() == group.a.log.state.groups.keys()


def test_a_broadcast_consumer_that_only_listens_is_not_forgotten():
    group, client = a_group(lease_ms=30_000, broadcast_forget_hours=1.0)
    group.clocks_agree()
    client.join("host1", group="host1", broadcast=True)
    for _ in range(200):
        group.a.wait(20_000)
        client.heartbeat()
        group.wait(1)
    assert ("s", "host1") in group.a.log.state.groups


@pytest.mark.parametrize(("away_ms", "is_forgotten"), [(3_600_000, False), (3_600_001, True)])
def test_a_broadcast_consumer_is_forgotten_when_it_was_away_for_longer(away_ms, is_forgotten):
    group, client = a_group(broadcast_forget_hours=1.0)
    group.clocks_agree()
    client.leave(client.join("host1", group="host1", broadcast=True))
    group.settle()
    group.a.stand_still(away_ms)
    assert (("s", "host1") not in group.a.log.state.groups) is is_forgotten
    group.a.stand_still(59_999)
    assert (("s", "host1") not in group.a.log.state.groups) is is_forgotten, "it is looked at once a minute"
    group.a.stand_still(1)
    assert ("s", "host1") not in group.a.log.state.groups


@pytest.mark.parametrize("is_heard", [True, False], ids=["another clock disagrees", "no other clock is heard"])
def test_a_clock_that_was_set_forgets_no_broadcast_consumer(is_heard):
    """It would begin at the end when it is back a moment later, and miss messages stored meanwhile."""
    group, client = a_group(broadcast_forget_hours=1.0)
    client.leave(client.join("host1", group="host1", broadcast=True))
    group.settle()
    if is_heard:
        group.clocks_agree()
    group.a.host.wall_skew_ms = 7_200_000
    group.a.stand_still(60_000)
    assert ("s", "host1") in group.a.log.state.groups
    group.clocks_agree()  # the other clock was wrong
    group.a.stand_still(1)
    assert ("s", "host1") not in group.a.log.state.groups


@pytest.mark.parametrize("who", ["broadcast", "other", "idle", "holds"])
def test_subscribe_without_a_change_writes_nothing(who):
    group, client = a_group("m0", "m1")
    client.subscribe("host1", group="host1", broadcast=True)
    held = pulled(group, client, subscription=1)
    if who != "holds":
        client.ack(held[0][0], held[-1][0] + 1, subscription=1)
    group.settle()
    end = group.a.log.end
    again = group.client("again")
    match who:
        case "broadcast":
            again.subscribe("host1", group="host1", broadcast=True)
        case "other":
            again.subscribe("c2")
        case "idle":
            again.subscribe("c1")
        case "holds":
            again.subscribe("c1", held_end=held[-1][0] + 1)
    group.settle()
    assert again.subscription(again.opaque) and group.a.log.end == end


def listened_for(group: Group, client: Client, seconds: int) -> None:
    """Let time pass with heartbeats of the consumer, and without messages."""
    for _ in range(seconds // 20):
        group.a.wait(20_000)
        client.heartbeat()
        group.wait(1)
    group.connect()  # the slave was silent all the time
    group.settle()


@pytest.mark.parametrize("how", ["unsubscribes", "vanishes"])
def test_absence_of_a_broadcast_consumer_begins_when_it_leaves_though_it_was_handed_nothing(how):
    group, client = a_group(lease_ms=30_000, broadcast_forget_hours=1.0)
    group.clocks_agree()
    opaque = client.subscribe("host1", group="host1", broadcast=True, start="latest")
    group.settle()
    listened_for(group, client, 4_000)
    if how == "unsubscribes":
        client.leave(client.subscription(opaque))
    client.lost()
    group.wait(7_500, times=20)
    group.connect()
    group.settle()
    client = group.client()
    assert client.store("while it was away")
    client.join("host1", group="host1", broadcast=True, start="latest")
    assert client.take() == ["while it was away"]


def test_a_broadcast_consumer_that_left_and_is_back_gets_numbers_that_were_never_given():
    group, client = a_group("m0", "m1")
    numbers = []
    for _ in range(2):
        subscription = client.join("host1", group="host1", broadcast=True)
        ((number, _, _),) = pulled(group, client, most=1)
        client.ack(number, number + 1)
        client.done(client.leave(subscription))
        numbers.append(number)
    assert numbers[0] < numbers[1]


def test_a_new_master_does_not_forget_a_broadcast_consumer_that_was_there_until_then():
    group, client = a_group(lease_ms=30_000, broadcast_forget_hours=1.0)
    group.clocks_agree()
    client.subscribe("host1", group="host1", broadcast=True, start="latest")
    listened_for(group, client, 4_000)
    assert client.store("right before the swap")
    group.b.host.clock_ms = group.a.host.clock_ms
    group.swap(2)
    group.a.wait(1_000)
    client = group.client()
    client.join("host1", group="host1", broadcast=True, start="latest")
    assert client.take() == ["right before the swap"]


def test_frames_record_a_retry():
    group, client = a_group("m0")
    client.take()
    first = client.first
    client.done(client.nack(first, first + 1, delay_ms=1_000))
    data = group.a.log.stored.read(0, group.a.log.end, 1 << 20).data
    frame, body = next(found for found in decode_frames(data, 0, 0) if found[0].kind == FrameKind.NACK)
    assert decode_progress(body) == ("g", "c1", ((first, first + 1, group.a.host.now_ms() + 1_000),))
    assert frame.subject == "s"


def test_consumer_actions_are_counted():
    group, client = a_group("m0", "m1", "m2", "m3", "m4", "m5")
    client.take(most=5)
    first = client.first
    client.ack_ranges((first, first + 1), (first + 2, first + 4))
    client.nack(first, first + 2)
    client.done(client.leave())
    client.subscribe("c2")
    assert client.take(subscription=2) == ["m1", "m4", "m5"]
    done = group.a.counters
    counts = done.pulled_messages, done.acked_messages, done.nacked_messages, done.returned_consumers
    assert counts == (8, 3, 1, 1), "of what is nacked, one is acked already"


def test_frames_record_progress():
    group, client = a_group("m0", "m1")
    client.take()
    first = client.first
    client.ack(first, first + 1)
    group.a.node.acting_master().move_group("s", "g", "latest", 0, dry_run=False, answer=lambda _: None)
    client.subscribe("host1", group="host1", broadcast=True, start="latest")
    client.done(client.leave(2))
    data = group.a.log.stored.read(0, group.a.log.end, 1 << 20).data
    kinds = (FrameKind.POSITION, FrameKind.PULL, FrameKind.ACK)
    frames = [(frame.kind, decode_progress(body)) for frame, body in decode_frames(data, 0, 0) if frame.kind in kinds]
    assert frames == [
        (FrameKind.POSITION, ("g", "", ((0, 0, 0),))),
        (FrameKind.PULL, ("g", "c1", ((first, 0, 2),))),
        (FrameKind.ACK, ("g", "c1", ((first, first + 1, 0),))),
        (FrameKind.POSITION, ("g", "", ((2, 0, 0),))),
        (FrameKind.POSITION, ("host1", "", ((2, 1, 0),))),
        (FrameKind.PULL, ("host1", "host1", ())),
        (FrameKind.POSITION, ("host1", "host1", ((Departure.NONE_BEGUN, 0, 0),))),
    ]


def test_subscribe_answer_lists_each_unacked_range():
    """Acks confirmed by a master alone may be missing at its successor: they must be sent again."""
    group, client = a_group("m0", "m1", "m2", "m3", "m4")
    client.take(most=4)
    first = client.first
    client.ack_ranges((first + 1, first + 2))
    pulled(group, client)
    again = group.client()
    answer = commands.decode_json(again.done(again.subscribe(held_end=first + 4)), unacked=list, acked_end=int)
    assert (answer["unacked"], answer["acked_end"]) == ([[first, first + 1], [first + 2, first + 4]], first)
