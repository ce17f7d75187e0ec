"""Core. Rare sequences of events, each of which once did harm."""

from __future__ import annotations

from qmq.broker.service_queue import COPIES_PER_PASS
from qmq.errors import CorruptFrame, ErrorCode
from qmq.log.fold import BATCHES_PER_PRODUCER
from qmq.log.frame import FrameKind, decode_frames
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.log.segments import log_name
from qmq.subjects import dead_letter_subject
from qmq.types import Role
from tests.unit.broker.world import Client, Group, a_group


def test_slave_of_an_older_row_does_not_count():
    group, client = a_group()
    client.store("m0")
    group.a.assign(Role.MASTER, 2)  # another broker is the slave now, and this one has no news of it
    group.cut()
    group.connect()
    group.settle()
    assert group.a.master.gate.too_few_in_sync and not group.a.master.has_begun
    late = client.produce("m1")
    group.settle()
    assert not client.answered(late) or client.code(late) == ErrorCode.READ_ONLY
    group.b.assign(Role.SLAVE, 2)
    group.connect()
    group.settle()
    assert not group.a.master.gate.too_few_in_sync and group.a.master.has_begun


def test_pull_that_asks_for_nothing_is_refused_and_waits_nowhere():
    group, client = a_group()
    nothing = client.pull(client.join(), most=0, timeout_ms=60_000)
    assert client.code(nothing) == ErrorCode.INVALID_REQUEST
    assert client.outcome(client.produce("m0")) == ErrorCode.SUCCESS, "commits go on"


def test_repeats_do_not_pile_up_while_the_slave_is_missing():
    group, client = a_group()
    group.settle()
    group.cut()
    waiting = group.a.master.gate.waiting
    group.connect()
    group.settle()
    client.produce("m0", batch=9)
    group.a.host.turn()
    group.cut()
    held = group.a.master.gate.waiting
    for _ in range(20):
        again = group.client("again")
        repeated = again.produce("m0", batch=9)
        assert again.code(repeated) == ErrorCode.OUTCOME_UNKNOWN
        again.lost()
    assert group.a.master.gate.waiting == held == waiting + 1


def test_produce_before_the_mastership_is_refused():
    """Nothing is stored then. After NOT_SERVED the producer would repeat the batch to this group for hours."""
    group, client = a_group()
    group.cut()
    group.a.crash()
    asked = group.client()
    assert asked.code(asked.produce("m0")) == ErrorCode.NOT_MASTER
    group.a.assign(Role.MASTER)
    refused = asked.produce("m1")
    assert asked.code(refused) == ErrorCode.READ_ONLY and "waits for its slave" in asked.text(refused)


def test_repeats_of_safe_batches_are_answered_at_once():
    group, client = a_group()
    safe = client.produce("m0", batch=9)
    group.settle()
    client.produce("m1", batch=10)
    group.a.host.turn()
    group.cut()
    waiting = group.a.master.gate.waiting
    for _ in range(20):
        assert client.receipt(client.produce("m0", batch=9)) == client.receipt(safe)
    assert group.a.master.gate.waiting == waiting


def test_acknowledged_frames_survive_a_replaced_copy():
    group, client = a_group()
    client.store("m0")
    client.produce("m1")
    client.produce("m2")  # in the same commit: its frame does not state yet that m1 is safe
    group.settle()
    client.store("m3")
    offset, end = group.a.log.frames("s", 1, 1)[0].offset, group.a.log.end
    group.a.disk.flip(log_name(0), 8 * (offset + 100))
    group.cut()
    group.a.crash()
    group.a.assign(Role.MASTER)
    damage = group.a.log.damage
    assert damage is not None and damage.begin == offset
    group.a.node.repairs.plan(0, 0)
    assert group.a.log.damage == damage and group.a.disk.names("quarantine") == []
    group.a.node.repairs.apply(offset, group.b.log.stored.read(offset, end, end).data)
    assert group.a.log.damage is None and group.a.log.end == end


def test_a_mastership_that_begins_with_a_damaged_log_takes_nothing_new_before_it_is_mended():
    group, client = a_group()
    client.store("m0")
    offset = group.b.log.frames("s", 0, 1)[0].offset
    whole = group.a.log.stored.read(offset, group.a.log.end, 1).data
    group.b.disk.flip(log_name(0), 8 * (offset + 100))
    group.b.node.found_damage(CorruptFrame(offset, "met by a reader"))
    group.swap(2)
    client = group.client()
    refused = client.produce("m1")
    assert client.code(refused) == ErrorCode.READ_ONLY and "corrupt" in client.text(refused)
    group.a.node.repairs.apply(offset, whole)
    stored = client.produce("m1")
    group.settle()
    assert client.receipt(stored).stored == 1


def test_pull_in_flight_when_the_slave_dies_is_given_back_and_those_behind_it_are_served():
    group, client = a_group()
    safe = client.produce("safe")
    subscribed = client.subscribe(start="earliest")
    group.settle()
    assert client.code(safe) == ErrorCode.SUCCESS
    client.produce("unsafe")
    mixed = client.pull(client.subscription(subscribed), timeout_ms=60_000)
    group.a.host.turn()
    group.cut()
    group.a.host.settle()
    assert client.code(mixed) == ErrorCode.NOT_SERVED, (client.pulled(mixed), group.a.master.gate)
    (subscription,) = group.a.master.subscriptions
    assert subscription.in_flight == client.link.owed_bytes == 0 and not subscription.owed
    again = client.pull(client.subscription(subscribed), timeout_ms=60_000)
    group.a.host.settle()
    assert client.ids(again) == ["safe"], "what both copies have goes on"


def test_heartbeat_of_replaced_connection_renews_no_lease():
    group, client = a_group()
    client.produce("m0")
    client.subscribe(consumer="c", start="earliest")
    second = group.client("second")
    second.pull(second.join(consumer="c", start="earliest"))
    group.settle()
    second.lost()
    for _ in range(40):
        client.heartbeat()
        group.wait(1_000)
    other = group.client("other")
    got = other.pull(other.join(consumer="d", start="earliest"))
    group.settle()
    assert other.ids(got) == ["m0"], "its lease ended, its message went back"


def test_read_of_a_cut_frame_is_no_damage():
    group, client = a_group()
    client.store("m0")
    for offset in (group.a.log.end, group.a.log.end + 4096, 0):
        group.a.node.found_damage(CorruptFrame(offset, "read at a bad moment"))
    assert group.a.log.damage is None and group.a.master.readonly.reasons == []


def test_message_that_fails_anew_after_its_group_was_moved_becomes_a_dead_letter_anew():
    group, client = a_group()
    client.produce("m0")
    for dead_letters in (1, 2):
        got = client.pull(client.join())
        group.settle()
        ((number, _, _),) = client.pulled(got)
        client.done(client.nack(number, number + 1, dead=True))
        assert group.a.log.state.next_sequence[dead_letter_subject("s", "g")] == dead_letters, "the first one is gone"
        group.a.master.move_group("s", "g", "earliest", 0, dry_run=False, answer=lambda error: None)
        group.settle()


def test_giving_up_on_very_many_messages_takes_many_turns_and_loses_none():
    group, client = a_group(segment_bytes=1 << 20)
    client.produce(*[f"m{i}" for i in range(2 * COPIES_PER_PASS + 10)])
    got = client.pull(client.join(), most=10_000)
    group.settle()
    pulled = client.pulled(got)
    counters, counts = group.a.counters, []
    opaque = client.nack(pulled[0][0], pulled[-1][0] + 1, dead=True)
    while not counts or counts[-1] < len(pulled):
        counts.append(counters.dead_letters.total())
        assert group.a.host.turn()
    assert counts == [COPIES_PER_PASS, 2 * COPIES_PER_PASS, len(pulled)]
    group.settle()
    assert client.code(opaque) == ErrorCode.SUCCESS and not group.a.log.state.groups["s", "g"].consumers["c1"].unacked


def test_tag_that_no_message_can_have_is_refused():
    _, client = a_group()
    for tags in (["\ud800"], [""], [True], [["pay"]]):
        assert client.code(client.subscribe(tags=tags)) == ErrorCode.INVALID_REQUEST


def test_waiting_pulls_do_not_rescan_blocked_messages():
    requeued = Requeued([RequeuedRange(sequence, 1, 1, 5_000 + sequence) for sequence in range(0, 30, 3)])

    def due(now_ms: int) -> list[int]:
        return [one.first for one in requeued.due(now_ms, 10)]

    assert due(4_999) == [] and requeued.next_due_ms(4_999) == 5_000
    assert due(5_003) == [0, 3]
    requeued.add(RequeuedRange(1, 1, 1, 4_000))
    assert due(4_000) == [1]
    requeued.take(1, 1)
    assert due(4_999) == [] and due(5_000) == [0]


def test_groups_that_are_forgotten_are_not_remembered_beside_the_log():
    group, client = a_group(broadcast_forget_hours=0.01)
    group.clocks_agree()
    for number in range(3):
        client.subscribe(f"c{number}", group=f"c{number}", broadcast=True, tags=["pay"])
    client.store("m0")
    group.a.master._delivery.consumption.note_skipped("s", "c0", 1)
    client.lost()
    group.wait(1_000, times=200)
    assert not group.a.log.state.groups
    master = group.a.master
    assert not master._delivery.serving.filters._asked
    assert not master.backlogs.ages_ms(group.a.host.now_ms()) and not master.causes.found and not master.skipped


def dead_of_s(group: Group) -> int:
    return group.a.log.state.next_sequence.get(dead_letter_subject("s", "g"), 0)


def a_poison_message(**settings) -> tuple[Group, Client, int, int]:
    """Group whose consumer is at the delivery limit of its message; returns the pull sequence of the next delivery,
    whose pull waits.
    """
    group, client = a_group(**settings)
    client.produce("m0")
    client.join(deliveries_max=1)
    first = client.pull()
    group.settle()
    client.produce("n0")
    client.done(client.nack(client.pulled(first)[0][0], client.pulled(first)[0][0] + 1))
    return group, client, client.pulled(first)[0][0] + 1, client.last_subscription


def test_dead_letters_continue_after_a_repair():
    group, client, _, subscription = a_poison_message(tail_bytes=0)
    (ref,) = group.a.log.frames("s", 0, 1)
    name = f"log/{group.a.log.bases[0]:020d}.log"
    group.a.disk.flip(name, 8 * (ref.offset + ref.length - 1))
    client.pull(subscription, most=1, timeout_ms=60_000)
    group.wait(100, times=3)
    assert group.a.log.damage is not None and not dead_of_s(group)
    group.a.disk.flip(name, 8 * (ref.offset + ref.length - 1))
    group.a.log.damage = None
    group.a.node.repaired()
    group.wait(100)
    assert dead_of_s(group) == 1


def test_consumer_that_reconnects_while_the_slave_is_missing_leaves_nothing_behind_each_time():
    group, client, begin, _ = a_poison_message()
    group.cut()
    for number in range(20):
        again = group.client(f"again{number}")
        subscribed = again.subscribe(deliveries_max=1, held_end=begin)
        group.a.host.settle()
        again.pull(again.subscription(subscribed), timeout_ms=60_000)
        group.a.host.settle()
        again.lost()
    (burial,) = group.a.master._delivery.serving.dead_letters._jobs
    assert len(burial.ranges) == 1
    group.connect()
    group.settle()
    group.wait(100)
    assert dead_of_s(group) == 1
    assert not group.a.master._delivery.serving.dead_letters._jobs


def test_consumer_whose_group_could_not_begin_is_not_subscribed():
    group, client = a_group(tail_bytes=0)
    for number in range(3):
        client.store(f"m{number}")
    ref = group.a.log.frames("s", 1, 1)[0]
    group.a.disk.flip(f"log/{group.a.log.bases[0]:020d}.log", 8 * ref.offset)
    refused = client.subscribe(start="since", since_ms=1)
    assert client.code(refused) == ErrorCode.NOT_SERVED and group.a.log.damage is not None
    assert client.code(client.pull(1, timeout_ms=60_000)) == ErrorCode.UNKNOWN_SUBSCRIPTION
    assert client.outcome(client.produce("more")) == ErrorCode.READ_ONLY


def test_no_more_dead_letters_are_stored_before_their_ack_than_the_next_master_would_recognize():
    group, client = a_group(segment_bytes=1 << 20)
    client.produce(*[f"m{i}" for i in range(300)])
    got = client.pull(client.join(), most=1_000)
    group.settle()
    numbers = [number for number, _, _ in client.pulled(got)]
    client.done(client.nack(numbers[10], numbers[-1] + 1, dead=True))
    assert dead_of_s(group) == 290
    waiting = 0
    for frame, _ in decode_frames(group.a.log.stored.read(0, group.a.log.end, 1 << 30).data, 0, 0):
        if frame.kind == FrameKind.MESSAGES and frame.subject == dead_letter_subject("s", "g"):
            waiting += 1
            assert waiting <= BATCHES_PER_PRODUCER
        elif frame.kind == FrameKind.ACK:
            waiting = 0
