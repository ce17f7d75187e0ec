"""Core. A delay group from end to end: stored, kept, sent once when due, over crashes and swaps."""

from __future__ import annotations

from unittest import mock

import pytest

from qmq.delayserver import cancellation
from qmq.delayserver.cancellation import MOVED_BYTES
from qmq.errors import ErrorCode
from qmq.log import MessageLog
from qmq.log.delay_frames import PLACE_BYTES
from qmq.log.frame import FrameKind
from qmq.rations import NewSubjects, SentBytes, TokenRation
from qmq.rights import Caller, TokenRole
from tests.unit.broker.world import Group, message
from tests.unit.delayserver.world import HOUR_MS, SETTINGS, DelayServer, Producer, Senders, a_group, delayed
from tests.unit.replication.copies import Copies as ThreeCopies


def test_message_with_a_bad_due_time_is_refused():
    copies, producer = a_group(delay_days_max=1)
    asked = producer.produce_raw(
        [message("s", "now"), delayed("s", "far", copies.now_ms + 25 * HOUR_MS), delayed("s", "ok", copies.now_ms)]
    )
    copies.run(200)
    receipt = producer.receipt(asked)
    assert receipt.stored == 1
    assert ["no due time" in receipt.refused[0][1], "at most 1" in receipt.refused[1][1]] == [True, True]
    assert copies.senders.delivered() == ["ok"]


@pytest.mark.parametrize("how", ["crash", "swap"])
def test_pending_messages_survive_and_are_sent_once(how):
    copies, producer = a_group()
    due_ms = copies.now_ms + 5_000
    producer.delayed(due_ms, *(f"m{i}" for i in range(50)))
    producer.delayed(due_ms + 3 * HOUR_MS, *(f"late{i}" for i in range(50)))
    copies.run(200)
    if how == "crash":
        copies.restart()
    else:
        copies.swap(2)
    copies.run(6_000)
    assert sorted(copies.senders.delivered()) == sorted(f"m{i}" for i in range(50))
    copies.run(3 * HOUR_MS, step_ms=60_000)
    assert len(copies.senders.delivered()) == len(set(copies.senders.delivered())) == 100


def test_unanswered_dispatch_is_repeated_by_a_late_master():
    """A rebuilt schedule lags behind. No other frame moves the gate then."""
    copies, producer = a_group()
    copies.senders.mute.add("g1")
    producer.delayed(copies.now_ms, "a")
    copies.run(300)
    attempts = len(copies.senders.attempts)
    with mock.patch("qmq.delayserver.master.DelayMaster._begin", return_value=False):
        copies.swap(2)
        copies.run(300)
        assert copies.a.master.gate.high_watermark == copies.a.log.end
    copies.senders.mute.clear()
    copies.run(2_000)
    assert copies.senders.attempts[attempts:] == copies.senders.attempts[:1]


def test_restored_master_reuses_no_batch_numbers():
    """The master was alone, so no other copy has its epoch frame, and its batch 1 was another one."""
    copies, producer = a_group()
    producer.delayed(copies.now_ms + 60_000, "first")
    producer.delayed(copies.now_ms + 120_000, "second")
    copies.run(2_000)  # the confirmation is written, too
    copies.cut()
    disk, shelf = copies.a.disk.copy(), copies.a.shelf.copy()
    for wait_ms in (70_000, 70_000):
        clock_ms = copies.b.host.clock_ms = copies.a.host.clock_ms + wait_ms
        copies.a.disk.put_back(disk)
        copies.a.shelf.put_back(shelf)
        copies.a.start()
        copies.a.host.clock_ms = clock_ms
        copies.a.assign(0, 1)
        copies.run(10_000, step_ms=1_000)
        assert copies.a.master.epoch == (1, 2)
    assert sorted(copies.senders.delivered()) == ["first", "first", "second"]


def test_absent_group_delays_no_other_subject():
    copies, producer = a_group("g1", "g2")
    copies.senders.up["g1"] = False
    copies.senders.routeless.add("lost")
    for i in range(20):
        producer.delayed(copies.now_ms, f"l{i}", subject="lost")
        producer.delayed(copies.now_ms, f"m{i}")
    copies.run(300)
    assert sorted(copies.senders.delivered()) == sorted(f"m{i}" for i in range(20))
    copies.senders.routeless.clear()
    copies.run(1_000)
    assert len(copies.senders.delivered()) == 40


def test_refused_batch_is_sent_again():
    copies, producer = a_group("g1")
    copies.senders.up["g1"] = True
    producer.delayed(copies.now_ms + 500, "m")
    copies.run(200)
    copies.senders.room = lambda name: 1 << 20  # it seems to be there
    copies.senders.groups = lambda subject: ["g1"]
    copies.senders.up["g1"] = False
    copies.run(1_000)
    assert copies.senders.attempts and copies.a.counters.not_stored_batches
    copies.senders.up["g1"] = True
    copies.run(10_000)
    assert copies.senders.delivered() == ["m"]


def test_refused_message_stays_and_is_retried():
    copies, producer = a_group()
    copies.senders.refusing["bad"] = "too large"
    producer.delayed(copies.now_ms, "good", "bad")
    copies.run(1_000)
    assert copies.senders.delivered() == ["good"] and copies.a.filing.schedule.pending_messages == 1
    copies.senders.refusing.clear()
    copies.senders.stored.clear()
    copies.run(310_000, step_ms=1_000)
    assert copies.senders.delivered() == ["bad"] and copies.a.filing.schedule.pending_messages == 0


# Cancellations.


def test_cancelled_messages_are_never_sent():
    copies, producer = a_group()
    producer.delayed(copies.now_ms, "sent")
    producer.delayed(copies.now_ms + 1_000, "c1", "stays")
    producer.delayed(copies.now_ms + 30 * HOUR_MS, "c2", key="order-1")
    copies.run(300)
    assert producer.cancelled("sent", "c1", "never was", keys=["order-1", "order-2"]) == [
        "sent",
        "cancelled",
        "unknown",
        "cancelled",
        "unknown",
    ]
    assert producer.cancelled("c1", keys=["order-1"]) == ["cancelled", "cancelled"]
    copies.run(40 * HOUR_MS, step_ms=600_000)
    assert copies.senders.delivered() == ["sent", "stays"]


def test_planned_message_counts_as_sent():
    copies, producer = a_group()
    copies.senders.mute.add("g1")
    producer.delayed(copies.now_ms, "m")
    copies.run(300)
    assert producer.cancelled("m") == ["sent"]


def test_cancel_needs_both_copies():
    copies, producer = a_group()
    producer.delayed(copies.now_ms + HOUR_MS, "m")
    copies.run(200)
    asked = producer.cancel("m")
    copies.a.host.settle()
    assert not producer.answered(asked)
    copies.settle()
    assert producer.fates(asked) == ["cancelled"]
    copies.cut()
    asked = producer.cancel("m")
    copies.a.host.settle()
    assert producer.code(asked) == ErrorCode.READ_ONLY


def test_rescheduled_message_is_sent_at_its_new_time():
    copies, producer = a_group()
    begin_ms = copies.now_ms
    producer.delayed(begin_ms + 1_000, "later")
    producer.delayed(begin_ms + 5 * HOUR_MS, "sooner")
    copies.run(200)
    asked = producer.reschedule("later", begin_ms + 2 * HOUR_MS), producer.reschedule("sooner", begin_ms + 1_500)
    copies.settle()
    assert [producer.fate(opaque) for opaque in asked] == ["rescheduled", "rescheduled"]
    copies.run(3_000)
    assert copies.senders.delivered() == ["sooner"]
    copies.swap(2)
    copies.run(6 * HOUR_MS, step_ms=60_000)
    assert copies.senders.delivered() == ["sooner", "later"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda producer: producer.cancel("\ud800"),
        lambda producer: producer.cancel(keys=["\udfff"]),
        lambda producer: producer.cancel("m", subject="\ud800"),
        lambda producer: producer.reschedule("\ud83d", 0),
        lambda producer: producer.reschedule("m", 10**400),
        lambda producer: producer.reschedule("m", -(10**400)),
    ],
)
def test_malformed_questions_are_refused(ask):
    """A packet that crashes a handler costs its sender the connection, with all requests on it."""
    copies, producer = a_group()
    producer.delayed(copies.now_ms + HOUR_MS, "\U0001f600")
    asked = ask(producer)
    copies.run(200)
    assert producer.code(asked) == ErrorCode.INVALID_REQUEST
    whole = producer.cancel("\U0001f600")
    copies.run(200)
    assert producer.fates(whole) == ["cancelled"]


def test_frames_of_large_keys_are_bounded():
    """One frame for all messages exceeded every reader's limit, and both copies were damaged there."""
    copies, producer = a_group()
    bodies = []
    append = MessageLog.append

    def noting(self, kind, subject, body, **more):
        bodies.append((kind, len(body)))
        return append(self, kind, subject, body, **more)

    count = 2 * MOVED_BYTES // 900
    for begin in range(0, count, 500):
        ids = map(str, range(begin, min(count, begin + 500)))
        producer.delayed(copies.now_ms + HOUR_MS, *ids, key="k", size=800)
        copies.run(200)
    with mock.patch.object(MessageLog, "append", noting), mock.patch(f"{cancellation.__name__}.CANCELLED_MAX", 1_000):
        asked = producer.reschedule("", copies.now_ms + 2 * HOUR_MS, key="k")
        copies.run(500)
        assert producer.fate(asked) == "rescheduled" and copies.a.filing.schedule.pending_messages == count
        asked = producer.cancel(keys=["k"])
        copies.run(500)
        assert producer.fates(asked) == ["cancelled"] and copies.a.filing.schedule.pending_messages == 0
    moves, cancels = (
        [size for written, size in bodies if written == kind] for kind in (FrameKind.CARRY, FrameKind.CANCEL)
    )
    assert len(moves) >= 2 and max(moves) <= 1.2 * MOVED_BYTES
    assert sum(cancels) == PLACE_BYTES * count and max(cancels) == PLACE_BYTES * 1_000


def test_reschedule_counts_towards_the_token_ration():
    """A reschedule of a hundred bytes writes all messages with its key again."""
    copies, producer = a_group()
    producer.delayed(copies.now_ms + HOUR_MS, *map(str, range(100)), key="k", size=800)
    producer.delayed(copies.now_ms + HOUR_MS, "m")
    copies.run(200)
    sent, shop, host = SentBytes(10_000), Caller("shop", TokenRole.CLIENT), copies.a.host
    producer.link.ration = TokenRation(shop, NewSubjects(1, 1), sent, host.monotonic_ms)

    def moved(hours, id="", key=""):
        end, asked = copies.a.log.end, producer.reschedule(id, copies.now_ms + hours * HOUR_MS, key=key)
        copies.run(200)
        return producer.code(asked), copies.a.log.end - end

    code, written = moved(2, key="k")
    assert code == ErrorCode.SUCCESS and written > 80_000
    with mock.patch.object(producer.link, "refuse", wraps=producer.link.refuse) as refuse:
        for again in ({"key": "k"}, {"id": "m"}):
            code, written = moved(3, **again)
            assert code == ErrorCode.OVERLOADED and written < 1_000, "nothing was moved"
    assert [call.args[1].limit for call in refuse.call_args_list] == ["token_bytes_per_s"] * 2
    assert moved(3, id="nobody")[0] == ErrorCode.SUCCESS, "it writes nothing"
    copies.run(10_000)
    assert moved(3, key="k")[0] == ErrorCode.SUCCESS, "it is paid for"


def test_cancel_finds_a_message_moved_meanwhile():
    """The search finds the message as moved, without its new place."""
    copies, producer = a_group()
    due_ms, host = copies.now_ms + 5 * HOUR_MS, copies.a.host
    producer.delayed(due_ms, "m", "x")
    copies.run(200)
    producer.cancel("x")  # from now on states are kept for this segment
    copies.run(200)
    moved, cancelled = producer.reschedule("m", due_ms + 30 * HOUR_MS), producer.cancel("m")
    host.do_read()
    while host.turn() or host.fsync():
        pass  # the message is filed at its new place before the second search
    copies.settle()
    copies.run(300)
    assert (producer.fate(moved), producer.fates(cancelled)) == ("rescheduled", ["cancelled"])
    copies.run(40 * HOUR_MS, step_ms=600_000)
    assert copies.senders.delivered() == []


# Retention.


@pytest.mark.slow
def test_pending_messages_are_carried_before_deletion():
    """QMQ's slave never gets messages that are older than its message log."""
    copies, producer = a_group(retention_hours=1, segment_bytes=1 << 20)
    due_ms = copies.now_ms + 50 * HOUR_MS
    producer.delayed(due_ms, *(f"m{i}" for i in range(20)))
    copies.outlive_segments(producer)
    assert copies.a.log.start > 0 and copies.b.log.start > 0, "the segments that had them are gone"
    copies.cut()
    copies.b.disk, copies.b.shelf = type(copies.b.disk)(), type(copies.b.shelf)()
    clock_ms = copies.b.host.clock_ms
    copies.b.start()
    copies.b.host.clock_ms = clock_ms
    copies.b.assign(1, 1)
    copies.connect()
    copies.run(2_000)
    copies.swap(2)
    copies.senders.stored.clear()
    copies.run(60 * HOUR_MS, step_ms=600_000)
    assert sorted(copies.senders.delivered()) == sorted(f"m{i}" for i in range(20))


@pytest.mark.parametrize("marked", ["*", "s"])
def test_messages_at_a_marked_group_can_be_cancelled(marked):
    """Draining one may take as long as the longest delay."""
    copies, producer = a_group()
    now_ms = copies.now_ms
    producer.delayed(now_ms + HOUR_MS, "m", "n", "o")
    copies.run(200)
    copies.a.master.readonly.mark_subjects(frozenset({marked}))
    refused = producer.delayed(now_ms + HOUR_MS, "new")
    cancelled, moved = producer.cancel("m"), producer.reschedule("n", now_ms + 5_000)
    copies.settle()
    assert producer.code(refused) == ErrorCode.READ_ONLY
    assert (producer.fates(cancelled), producer.fate(moved)) == (["cancelled"], "rescheduled")
    copies.run(6_000)
    assert copies.senders.delivered() == ["n"]
    copies.cut()
    asked = producer.cancel("o")
    copies.a.host.settle()
    assert producer.code(asked) == ErrorCode.READ_ONLY, "one disk alone can take nothing back"


@pytest.mark.parametrize("how", ["while it runs", "before it starts"])
def test_given_up_messages_delay_no_others(how):
    """Given-up messages stayed pending without bytes: batches with them were retried for ever."""
    copies, producer = a_group(segment_bytes=1 << 14)
    due_ms = copies.now_ms + HOUR_MS
    producer.delayed(due_ms, *(f"lost{i}" for i in range(10)), size=900)
    copies.run(100)
    while len(copies.a.log.bases) < 4:
        producer.delayed(due_ms, f"kept{len(copies.a.log.bases)}-{copies.now_ms}", size=900)
        copies.run(100)
    copies.run(60_000, step_ms=10_000)  # the schedule has a checkpoint
    kept = copies.a.log.state.next_sequence["s"] - copies.a.log.first_kept("s", copies.a.log.bases[1])
    for server in (copies.a, copies.b):
        server.log.set_aside_oldest_segment("given-up")
        server.log.flush()
    if how == "before it starts":
        copies.restart()
    copies.run(2 * HOUR_MS, step_ms=60_000)
    assert len(copies.senders.delivered()) == kept and not any("lost" in id for id in copies.senders.delivered())
    assert copies.a.master.stats()["pending_messages"] == 0


# Clocks.


@pytest.mark.parametrize("jump_ms", [24 * HOUR_MS, -24 * HOUR_MS])
def test_clock_jump_moves_no_message(jump_ms, caplog):
    copies, producer = a_group()
    due_at = copies.a.host.clock_ms + 10_000
    producer.delayed(copies.now_ms + 10_000, "m")
    copies.run(200)
    copies.a.host.wall_skew_ms = jump_ms
    while copies.a.host.clock_ms < due_at - 200:
        copies.run(100)
    assert copies.senders.delivered() == [] and "clock is wrong" in caplog.text
    copies.run(400)
    assert copies.senders.delivered() == ["m"] and copies.a.master.clock_off_ms == jump_ms


def test_repeated_batch_has_its_first_receipt():
    copies, producer = a_group(delay_days_max=1)
    batch = [delayed("s", "ok", copies.now_ms), delayed("s", "too far", copies.now_ms + 24 * HOUR_MS + 500)]
    asked = producer.produce_raw(batch, batch=5)
    copies.settle()
    assert (producer.receipt(asked).stored, [at for at, _ in producer.receipt(asked).refused]) == (1, [1])
    again = producer.produce_raw(batch, batch=5)
    copies.settle()
    assert producer.receipt(again) == producer.receipt(asked)
    copies.run(1_000)
    again = producer.produce_raw(batch, batch=5)
    copies.settle()
    receipt = producer.receipt(again)
    assert receipt.stored == 1 and [at for at, _ in receipt.refused] == [1], "the log says which of them is there"


def flush_is_out(filing, host):
    filing.keep(host.now_ms() + HOUR_MS)
    filing.rebuild("the log's end was cut")


def read_is_out(filing, host):
    filing.rebuild("its files are damaged")
    filing.go_on(filing.known_end)


@pytest.mark.parametrize("begin, tail_bytes", [(flush_is_out, 1 << 20), (read_is_out, 0)])
def test_schedule_beyond_a_cut_does_not_count_as_filed(begin, tail_bytes):
    """The schedule is rebuilt when no read or flush is running. A master that used it until then sent cut plans."""
    copies, producer = a_group(tail_bytes=tail_bytes)
    producer.delayed(copies.now_ms + HOUR_MS, "m")
    copies.run(2_000)
    filing, host = copies.a.filing, copies.a.host
    assert filing.reaches(copies.a.log.flushed_end)
    begin(filing, host)
    ((job, done),) = host.reads
    host.reads.clear()
    assert not filing.reaches(filing.schedule.filed_end)
    copies.run(200)
    assert not filing.reaches(filing.schedule.filed_end)
    done(job())
    copies.run(200)
    assert filing.reaches(copies.a.log.flushed_end) and filing.schedule.pending_messages == 1


class DelayCopies(ThreeCopies):
    """Three delay servers; `run` lets time pass."""

    def __init__(self) -> None:
        self.senders = Senders()
        self.a, self.b, self.c = (DelayServer(name, SETTINGS, self.senders) for name in "abc")
        self.min_copies, self.wires = 2, {"b": Group(self.a, self.b), "c": Group(self.a, self.c)}

    def run(self, ms: int) -> None:
        for _ in range(ms // 100):
            for server in (self.a, self.b, self.c):
                server.host.clock_ms += 100
                server.node.record_metaserver_clock(server.host.now_ms())
                server.node.tick()
                server.beat()
            self.settle()


def test_delay_group_continues_with_two_of_three():
    copies = DelayCopies()
    copies.start()
    copies.run(200)
    producer = Producer(copies.a)
    first = producer.delayed(copies.a.host.now_ms() + 2_000, "m1")
    copies.settle()
    copies.cut("c")
    second = producer.delayed(copies.a.host.now_ms() + 2_000, "m2")
    copies.settle()
    assert producer.receipt(first).stored == producer.receipt(second).stored == 1
    copies.run(1_800)
    assert not copies.senders.delivered()
    copies.run(600)
    assert sorted(copies.senders.delivered()) == ["m1", "m2"]
    copies.connect("c")
    copies.run(200)
    assert copies.a.log.chain == copies.b.log.chain == copies.c.log.chain
    assert copies.c.filing.known_end == copies.b.filing.known_end
