"""Core. Recurring schedules from end to end, without a world: each occurrence once, over crashes and absences."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import numpy as np
import pytest

from delayserver.templates import LABEL
from qmq.codec import encode_labels, encode_message, with_properties
from qmq.errors import ErrorCode
from qmq.log.frame import FLAG_LABELLED
from qmq.log.memory_disk import FaultyDisk
from qmq.log.segments import log_name
from qmq.message import RECUR_CRON, RECUR_NAME, RECUR_OWNER, RECUR_ZONE, Message
from tests.unit.delayserver.test_master import restart
from tests.unit.delayserver.world import HOUR_MS, Pair, Producer, delayed

MINUTE_MS = 60_000


def a_pair(**changes):
    pair = Pair.made(**changes)
    pair.start()
    pair.run(100)
    return pair, Producer(pair.a)


def put(pair, producer, *args, **kwargs):
    asked = producer.recur("put", *args, **kwargs)
    pair.run(200)
    (schedule,) = producer.schedules(asked)
    return schedule


def listed(pair, producer, subject="s"):
    asked = producer.recur("list", "", subject=subject)
    pair.run(100)
    return producer.schedules(asked)


def times(pair):
    """Return the times in the ids of what was sent, to the minute."""
    return [id.split("@")[1][:16] for id in pair.senders.delivered() if "@" in id]


def minutes(begin, count):
    return [f"2023-11-14T{22 + at // 60}:{at % 60:02}" for at in range(begin, begin + count)]


def run_until(pair, text):
    """Let time pass until `text` (UTC), half a second more."""
    end_ms = int(datetime.fromisoformat(text + ":00+00:00").timestamp() * 1000) + 500
    while pair.now_ms < end_ms:
        pair.run(min(10_000, end_ms - pair.now_ms), step_ms=min(10_000, end_ms - pair.now_ms))
    pair.run(300)


def test_schedule_sends_one_message_each_time_with_an_id_of_its_own():
    pair, producer = a_pair()  # it is 22:13
    schedule = put(pair, producer, cron="*/2 * * * *", owner="billing")
    assert (schedule.name, schedule.owner, schedule.cron) == ("daily", "billing", "*/2 * * * *")
    assert schedule.next_at == datetime(2023, 11, 14, 22, 14, tzinfo=UTC)
    run_until(pair, "2023-11-14T22:20")
    assert times(pair) == [f"2023-11-14T22:{at}" for at in (14, 16, 18, 20)]
    assert len(set(pair.senders.delivered())) == 4
    (schedule,) = listed(pair, producer)
    assert schedule.next_at == datetime(2023, 11, 14, 22, 22, tzinfo=UTC)
    assert pair.a.filing.schedule.pending_messages == 1 and pair.a.counters.recurred_messages == 4


@pytest.mark.parametrize("how", ["crash", "swap", "both"])
def test_over_crashes_and_swaps_each_occurrence_is_sent_once(how):
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    term = 2
    for at in range(16, 40, 4):
        run_until(pair, f"2023-11-14T22:{at}")
        if how != "swap":
            restart(pair)
        if how != "crash":
            pair.swap(term)
            term += 1
    run_until(pair, "2023-11-14T22:41")
    assert times(pair) == minutes(14, 28)


def test_power_cut_within_any_byte_of_an_occurrence_loses_and_doubles_nothing():
    """The occurrence and the next template are one frame: whatever the disk kept of it, both or none are there."""
    for kept in range(0, 560, 40):
        pair, producer = a_pair()
        put(pair, producer, cron="* * * * *")
        before = pair.a.log.end
        ahead_ms = MINUTE_MS - pair.now_ms % MINUTE_MS + 10
        for server in (pair.a, pair.b):
            server.host.clock_ms += ahead_ms
        pair.a.beat()
        pair.a.host.settle()  # nothing reaches the slave
        assert pair.a.log.flushed_end >= before + 560
        pair.a.disk.write(log_name(0), before + kept, [bytes(pair.a.log.end - before - kept)])
        pair.a.disk.sync(log_name(0))
        restart(pair)
        run_until(pair, "2023-11-14T22:16")
        assert times(pair) == minutes(14, 3), f"{kept} bytes were kept"


@pytest.mark.parametrize("seed", range(8))
def test_any_crashes_swaps_and_absent_brokers_leave_each_occurrence_once(seed):
    rng = random.Random(seed)
    pair, producer = a_pair()
    put(pair, producer, "steady", cron="* * * * *")
    term = 1
    for _ in range(40):
        match rng.choice(["crash", "swap", "away", "back", "mute", "put", "wait"]):
            case "crash":
                pair.cut()
                clock_ms = pair.a.host.clock_ms
                pair.a.crash(rng)
                pair.a.host.clock_ms = clock_ms
                pair.a.assign(0, term)
                pair.connect()
                pair.settle()
            case "swap":
                term += 1
                pair.swap(term)
            case "away":
                pair.senders.up["g1"] = False
            case "back":
                pair.senders.up["g1"] = True
                pair.senders.mute.clear()
            case "mute":
                pair.senders.mute.add("g1")
            case "put":
                producer = Producer(pair.a)
                producer.recur("put", rng.choice("abc"), cron=rng.choice(["*/2 * * * *", "* * * * *"]))
        at_ms = rng.randrange(MINUTE_MS)  # often close to a full minute
        pair.run(rng.choice([100, 300, at_ms, MINUTE_MS - pair.now_ms % MINUTE_MS]), step_ms=rng.choice([50, 5_000]))
    pair.senders.up["g1"] = True
    pair.senders.mute.clear()
    pair.run(60_000, step_ms=500)
    ids = pair.senders.delivered()
    assert len(ids) == len(set(ids))
    last = int(datetime.fromtimestamp(pair.now_ms / 1000, UTC).timestamp()) // 60
    first = int(datetime(2023, 11, 14, 22, 14, tzinfo=UTC).timestamp()) // 60
    steady = sorted(id.split("@")[1][:16] for id in ids if id.startswith("steady@"))
    expected = [datetime.fromtimestamp(at * 60, UTC).isoformat()[:16] for at in range(first, last + 1)]
    assert steady == expected
    assert len({one.name for one in listed(pair, Producer(pair.a))}) == len(listed(pair, Producer(pair.a)))


def test_of_missed_occurrences_the_latest_is_sent_and_the_others_are_counted():
    pair, producer = a_pair()
    put(pair, producer, cron="*/5 * * * *")
    run_until(pair, "2023-11-14T22:20")
    pair.cut()
    clock_ms = pair.a.host.clock_ms
    pair.a.crash()
    pair.a.host.clock_ms = pair.b.host.clock_ms = clock_ms + 90 * MINUTE_MS  # nobody was there until 23:50
    pair.a.assign(0, 1)
    pair.connect()
    pair.settle()
    pair.run(500)
    assert times(pair) == ["2023-11-14T22:15", "2023-11-14T22:20", "2023-11-14T23:50"]
    assert pair.a.counters.skipped_occurrences == 17
    run_until(pair, "2023-11-14T23:55")
    assert times(pair)[3:] == ["2023-11-14T23:55"]


def test_broker_groups_that_are_away_do_not_stop_a_schedule_and_get_what_came_due():
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    pair.senders.up["g1"] = False
    run_until(pair, "2023-11-14T22:18")
    pair.senders.up["g1"] = True
    pair.run(10_000)
    assert times(pair) == minutes(14, 5)


def test_many_schedules_of_several_subjects_that_are_due_at_once_are_all_sent_once():
    pair, producer = a_pair()
    for at in range(240):
        size = 600 if at % 7 == 0 else 1
        producer.recur("put", f"n{at}", subject=f"s{at % 3}", cron="* * * * *", properties={"x": "y" * size})
        pair.run(100)
    run_until(pair, "2023-11-14T22:16")
    sent = len(pair.senders.delivered())
    run_until(pair, "2023-11-14T22:18")
    assert len(pair.senders.delivered()) - sent == 480 and len(set(pair.senders.delivered())) == sent + 480


def test_put_replaces_the_schedule_of_that_name_and_no_other():
    pair, producer = a_pair()
    put(pair, producer, "a", cron="* * * * *")
    put(pair, producer, "b", cron="* * * * *")
    put(pair, producer, "a", cron="30 22 * * *")
    put(pair, producer, "a", cron="20 22 * * *", subject="other")
    assert [(one.name, one.cron) for one in listed(pair, producer)] == [("a", "30 22 * * *"), ("b", "* * * * *")]
    assert [(one.name, one.cron) for one in listed(pair, producer, "other")] == [("a", "20 22 * * *")]
    run_until(pair, "2023-11-14T22:15")
    assert [id[:18] for id in pair.senders.delivered()] == ["b@2023-11-14T22:14", "b@2023-11-14T22:15"]


def test_many_puts_of_one_name_at_once_leave_one_schedule():
    pair, producer = a_pair()
    asked = [producer.recur("put", "a", cron=f"{at} 23 * * *") for at in range(20)]
    pair.run(5_000)
    assert [producer.schedules(one)[0].cron for one in asked] == [f"{at} 23 * * *" for at in range(20)]
    assert [one.cron for one in listed(pair, producer)] == ["19 23 * * *"]


def test_put_that_is_asked_again_changes_nothing():
    """Each instance of an application puts its schedules as it starts: none of that may move or lose an occurrence."""
    pair, producer = a_pair()
    put(pair, producer, cron="*/2 * * * *", properties={"kind": "report"})
    end = pair.a.log.end
    put(pair, producer, cron="*/2 * * * *", properties={"kind": "report"})
    assert pair.a.log.end == end
    put(pair, producer, cron="*/2 * * * *", properties={"kind": "other"})
    assert pair.a.log.end > end


def test_put_at_the_moment_an_occurrence_is_due_does_not_swallow_it():
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    ahead_ms = MINUTE_MS - pair.now_ms % MINUTE_MS
    for server in (pair.a, pair.b):
        server.host.clock_ms += ahead_ms  # it is due, and the master has not looked yet
    asked = producer.recur("put", cron="*/10 * * * *")
    run_until(pair, "2023-11-14T22:20")
    assert producer.schedules(asked)[0].cron == "*/10 * * * *"
    assert times(pair) == ["2023-11-14T22:14", "2023-11-14T22:20"]


def test_deleted_schedule_sends_nothing_more_and_delete_may_be_asked_again():
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    run_until(pair, "2023-11-14T22:14")
    asked = producer.recur("delete")
    pair.run(200)
    assert [one.name for one in producer.schedules(asked)] == ["daily"]
    run_until(pair, "2023-11-14T22:18")
    pair.swap(2)
    run_until(pair, "2023-11-14T22:20")
    assert times(pair) == minutes(14, 1) and pair.a.filing.schedule.pending_messages == 0
    again = Producer(pair.a)
    asked = again.recur("delete")
    pair.run(200)
    assert again.schedules(asked) == []


def test_operator_deletes_a_schedule_as_any_delayed_message_by_its_id():
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    run_until(pair, "2023-11-14T22:15")
    asked = producer.cancel("recurring:daily")
    pair.settle()
    assert producer.fates(asked) == ["cancelled"]
    run_until(pair, "2023-11-14T22:20")
    assert times(pair) == minutes(14, 2) and listed(pair, producer) == []


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"cron": "every day"}, "write five"),
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"cron": "* * * * * *"}, "has 6 fields"),
        ({"timezone": "Berlin"}, "Europe/Berlin"),
        ({"timezone": "../../etc/passwd"}, "not known here"),
        ({"name": "n" * 61}, "longer than 60"),
        ({"name": "a/b"}, "slashes"),
        ({"owner": ""}, "owner of a recurring schedule is empty"),
        ({"properties": {"x": "y" * 1000}}, "more than 1024"),
    ],
)
def test_wrong_schedule_is_refused_and_says_why(wrong, text):
    pair, producer = a_pair()
    asked = producer.recur("put", **wrong)
    pair.run(100)
    assert text in producer.text(asked) and producer.code(asked) >= 300 or producer.code(asked) == 53
    assert listed(pair, producer) == []


def test_subject_has_a_limit_of_schedules_and_those_there_may_be_replaced():
    pair, producer = a_pair(recurring_max=3)
    for name in "abc":
        put(pair, producer, name)
    asked = producer.recur("put", "d")
    pair.run(200)
    assert producer.code(asked) == ErrorCode.INVALID_REQUEST and "may have no more" in producer.text(asked)
    put(pair, producer, "c", cron="0 9 * * *")
    put(pair, producer, "d", subject="other")


def test_put_is_answered_when_both_disks_have_it_and_refused_without_a_slave():
    pair, producer = a_pair()
    asked = producer.recur("put")
    pair.a.host.settle()
    assert not producer.answered(asked)
    pair.settle()
    assert producer.schedules(asked)
    pair.cut()
    for action, cron in (("put", "0 9 * * *"), ("delete", "")):
        asked = producer.recur(action, cron=cron)
        pair.a.host.settle()
        assert producer.code(asked) == ErrorCode.READ_ONLY
    asked = producer.recur("put")
    pair.a.host.settle()
    assert producer.schedules(asked), "the same again needs nothing to be written"
    asked = producer.recur("list", "")
    pair.a.host.settle()
    assert [one.name for one in producer.schedules(asked)] == ["daily"]


def test_group_that_an_operator_marked_goes_on_and_lets_schedules_be_deleted():
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    pair.a.master.readonly.mark_subjects(frozenset({"*"}))
    asked = producer.recur("put", "other")
    run_until(pair, "2023-11-14T22:15")
    assert producer.code(asked) == ErrorCode.READ_ONLY and times(pair) == minutes(14, 2)
    asked = producer.recur("delete")
    pair.run(200)
    assert producer.schedules(asked) and listed(pair, producer) == []


def test_without_a_slave_schedules_go_on_and_come_no_flood_when_it_is_back():
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    run_until(pair, "2023-11-14T22:14")
    pair.cut()
    run_until(pair, "2023-11-14T22:18")
    assert times(pair) == minutes(14, 5)
    pair.connect()
    run_until(pair, "2023-11-14T22:20")
    assert times(pair) == minutes(14, 7)


def a_pair_whose_master_restarted_alone():
    """It has a schedule for each minute, with a template that the slave does not have."""
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    pair.cut()
    run_until(pair, "2023-11-14T22:15")  # the template is now one that the slave does not have
    clock_ms = pair.a.host.clock_ms
    pair.a.crash()
    pair.a.host.clock_ms = clock_ms
    pair.a.assign(0, 1)
    run_until(pair, "2023-11-14T22:20")
    return pair


def test_master_that_restarts_alone_waits_with_what_only_it_has_and_sends_the_latest():
    pair = a_pair_whose_master_restarted_alone()
    pair.connect()
    run_until(pair, "2023-11-14T22:21")
    assert times(pair) == [*minutes(14, 2), *minutes(20, 2)]


def test_put_of_a_schedule_that_cannot_go_on_now_is_refused_and_holds_up_no_other_request():
    pair = a_pair_whose_master_restarted_alone()
    producer = Producer(pair.a)
    for cron in ("* * * * *", "0 * * * *"):
        changed, others = producer.recur(cron=cron), producer.recur("list", "", subject="other")
        pair.run(1_000)
        assert producer.code(changed) == ErrorCode.READ_ONLY and producer.schedules(others) == []


def test_template_is_carried_as_any_message_before_the_log_lets_it_go():
    pair, producer = a_pair(retention_hours=1, segment_bytes=1 << 20)
    put(pair, producer, cron="0 8 20 11 *")
    for hour in range(1, 6):
        for _ in range(40):
            producer.delayed(pair.now_ms, *(f"x{hour}" for _ in range(60)), size=900)
            pair.run(100)
        pair.run(HOUR_MS, step_ms=60_000)
        pair.a.drop(), pair.b.drop()
    assert pair.a.log.start > 0
    assert [one.name for one in listed(pair, producer)] == ["daily"]
    pair.swap(2)
    pair.senders.stored.clear()
    pair.run(6 * 24 * HOUR_MS, step_ms=600_000)
    assert times(pair) == ["2023-11-20T08:00"]


def test_schedule_that_is_made_anew_goes_on():
    pair, producer = a_pair()
    put(pair, producer, cron="* * * * *")
    run_until(pair, "2023-11-14T22:15")
    pair.a.shelf = FaultyDisk()
    restart(pair)
    run_until(pair, "2023-11-14T22:18")
    assert times(pair) == minutes(14, 5)


def test_ordinary_messages_with_the_label_of_a_template_are_sent_as_they_are():
    pair, producer = a_pair()
    message = delayed("s", "m", pair.now_ms)
    producer.produce_raw([message], after=encode_labels([LABEL]), flags=FLAG_LABELLED)
    pair.run(500)
    assert pair.senders.delivered() == ["m"] and listed(pair, producer) == []


def test_schedule_whose_zone_is_not_known_here_waits_holds_up_nothing_and_can_be_put_right(caplog):
    """As after a swap to a machine with an older list of time zones."""
    pair, producer = a_pair()
    own = {RECUR_NAME: "daily", RECUR_OWNER: "o", RECUR_CRON: "* * * * *", RECUR_ZONE: "Mars/Olympus"}
    message = with_properties(delayed("s", "recurring:daily", pair.now_ms), own)
    producer.produce_raw([message], after=encode_labels([LABEL]), flags=FLAG_LABELLED)
    put(pair, producer, "good", cron="* * * * *")
    run_until(pair, "2023-11-14T22:14")
    assert [id[:5] for id in pair.senders.delivered()] == ["good@"] and "Mars/Olympus" in caplog.text
    put(pair, producer, "daily", cron="* * * * *")
    run_until(pair, "2023-11-14T22:15")
    assert sorted(id.split("@")[0] for id in pair.senders.delivered()) == ["daily", "good", "good"]


def test_label_of_templates_is_one_that_no_message_has():
    tags = [f"tag{at}" for at in range(10)]
    data = encode_message(Message("s", id="m", tags=tags), 0)
    assert data and np.uint64(LABEL).bit_count() == 32
