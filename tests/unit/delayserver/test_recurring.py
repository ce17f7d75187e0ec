"""Core. Recurring schedules from end to end: each occurrence once, over crashes and outages."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import numpy as np
import pytest

from qmq.codec import FLAG_TAGS, encode_labels, encode_message, label_of, with_properties
from qmq.delayserver.recurring import FIRED_AT_ONCE
from qmq.delayserver.templates import LABEL, read_template
from qmq.errors import ErrorCode
from qmq.log.frame import FLAG_LABELLED
from qmq.log.memory_disk import MemoryDisk
from qmq.log.segments import log_name
from qmq.message import RECUR_CRON, RECUR_NAME, RECUR_OWNER, RECUR_ZONE, Message
from qmq.remoting.commands import Command, Recur, RecurAction, encode_recur
from tests.support.effort import examples
from tests.unit.delayserver.world import HOUR_MS, a_group, delayed

MINUTE_MS = 60_000


def put(copies, producer, *args, **kwargs):
    asked = producer.recur("put", *args, **kwargs)
    copies.run(200)
    (schedule,) = producer.schedules(asked)
    return schedule


def listed(copies, producer, subject="s"):
    asked = producer.recur("list", "", subject=subject)
    copies.run(100)
    return producer.schedules(asked)


def times(copies):
    """Return the times in the ids of sent messages, to the minute."""
    return [id.split("@")[1][:16] for id in copies.senders.delivered() if "@" in id]


def minutes(begin, count):
    return [f"2023-11-14T{22 + at // 60}:{at % 60:02}" for at in range(begin, begin + count)]


def run_until(copies, text):
    """Let time pass until `text` (UTC) and half a second more."""
    end_ms = int(datetime.fromisoformat(text + ":00+00:00").timestamp() * 1000) + 500
    while copies.now_ms < end_ms:
        copies.run(min(10_000, end_ms - copies.now_ms), step_ms=min(10_000, end_ms - copies.now_ms))
    copies.run(300)


def until_due(copies, late_ms=0):
    """Let the clocks reach the next full minute; the servers have not run since."""
    ahead_ms = MINUTE_MS - copies.now_ms % MINUTE_MS + late_ms
    for server in (copies.a, copies.b):
        server.host.clock_ms += ahead_ms


def test_schedule_sends_one_message_each_time():
    copies, producer = a_group()  # it is 22:13
    schedule = put(copies, producer, cron="*/2 * * * *", owner="billing")
    assert (schedule.name, schedule.owner, schedule.cron) == ("daily", "billing", "*/2 * * * *")
    assert schedule.next_at == datetime(2023, 11, 14, 22, 14, tzinfo=UTC)
    run_until(copies, "2023-11-14T22:20")
    assert times(copies) == [f"2023-11-14T22:{at}" for at in (14, 16, 18, 20)]
    assert len(set(copies.senders.delivered())) == 4
    (schedule,) = listed(copies, producer)
    assert schedule.next_at == datetime(2023, 11, 14, 22, 22, tzinfo=UTC)
    assert copies.a.filing.schedule.pending_messages == 1 and copies.a.counters.recurred_messages == 4


def test_power_cut_within_an_occurrence_changes_nothing():
    """The occurrence and the next template are one frame: the disk kept both or neither."""
    for kept in range(0, 560, 40):
        copies, producer = a_group()
        put(copies, producer, cron="* * * * *")
        before = copies.a.log.end
        until_due(copies, late_ms=10)
        copies.a.beat()
        copies.a.host.settle()  # nothing reaches the slave
        assert copies.a.log.flushed_end >= before + 560
        copies.a.disk.write(log_name(0), before + kept, [bytes(copies.a.log.end - before - kept)])
        copies.a.disk.sync(log_name(0))
        copies.restart()
        run_until(copies, "2023-11-14T22:16")
        assert times(copies) == minutes(14, 3), f"{kept} bytes were kept"


@pytest.mark.parametrize("seed", range(examples(8)))
def test_any_crashes_swaps_and_absent_brokers_leave_each_occurrence_once(seed):
    rng = random.Random(seed)
    copies, producer = a_group()
    put(copies, producer, "steady", cron="* * * * *")
    term = 1
    for _ in range(40):
        match rng.choice(["crash", "swap", "away", "back", "mute", "put", "wait"]):
            case "crash":
                copies.power_fails(term, rng)
                copies.agree()
            case "swap":
                term += 1
                copies.swap(term)
            case "away":
                copies.senders.up["g1"] = False
            case "back":
                copies.senders.up["g1"] = True
                copies.senders.mute.clear()
            case "mute":
                copies.senders.mute.add("g1")
            case "put":
                producer = copies.producer()
                producer.recur("put", rng.choice("abc"), cron=rng.choice(["*/2 * * * *", "* * * * *"]))
        at_ms = rng.randrange(MINUTE_MS)  # often close to a full minute
        copies.run(
            rng.choice([100, 300, at_ms, MINUTE_MS - copies.now_ms % MINUTE_MS]), step_ms=rng.choice([50, 5_000])
        )
    copies.senders.up["g1"] = True
    copies.senders.mute.clear()
    copies.run(60_000, step_ms=500)
    ids = copies.senders.delivered()
    assert len(ids) == len(set(ids))
    last = int(datetime.fromtimestamp(copies.now_ms / 1000, UTC).timestamp()) // 60
    first = int(datetime(2023, 11, 14, 22, 14, tzinfo=UTC).timestamp()) // 60
    steady = sorted(id.split("@")[1][:16] for id in ids if id.startswith("steady@"))
    expected = [datetime.fromtimestamp(at * 60, UTC).isoformat()[:16] for at in range(first, last + 1)]
    assert steady == expected
    assert len({schedule.name for schedule in listed(copies, copies.producer())}) == len(
        listed(copies, copies.producer())
    )


def test_latest_missed_occurrence_is_sent():
    copies, producer = a_group()
    put(copies, producer, cron="*/5 * * * *")
    run_until(copies, "2023-11-14T22:20")
    for server in (copies.a, copies.b):
        server.host.clock_ms += 90 * MINUTE_MS  # an outage until 23:50
    copies.power_fails()
    copies.agree()
    copies.run(500)
    assert times(copies) == ["2023-11-14T22:15", "2023-11-14T22:20", "2023-11-14T23:50"]
    assert copies.a.counters.skipped_occurrences == 17
    run_until(copies, "2023-11-14T23:55")
    assert times(copies)[3:] == ["2023-11-14T23:55"]


@pytest.mark.slow
def test_many_due_schedules_are_sent_once():
    copies, producer = a_group()
    for at in range(240):
        size = 600 if at % 7 == 0 else 1
        producer.recur("put", f"n{at}", subject=f"s{at % 3}", cron="* * * * *", properties={"x": "y" * size})
        copies.run(100)
    run_until(copies, "2023-11-14T22:16")
    sent = len(copies.senders.delivered())
    run_until(copies, "2023-11-14T22:18")
    assert len(copies.senders.delivered()) - sent == 480 and len(set(copies.senders.delivered())) == sent + 480


def test_put_replaces_the_schedule_of_its_name():
    copies, producer = a_group()
    put(copies, producer, "a", cron="* * * * *")
    put(copies, producer, "b", cron="* * * * *")
    put(copies, producer, "a", cron="30 22 * * *")
    put(copies, producer, "a", cron="20 22 * * *", subject="other")
    assert [(schedule.name, schedule.cron) for schedule in listed(copies, producer)] == [
        ("a", "30 22 * * *"),
        ("b", "* * * * *"),
    ]
    assert [(schedule.name, schedule.cron) for schedule in listed(copies, producer, "other")] == [("a", "20 22 * * *")]
    run_until(copies, "2023-11-14T22:15")
    assert [id[:18] for id in copies.senders.delivered()] == ["b@2023-11-14T22:14", "b@2023-11-14T22:15"]


def test_concurrent_puts_leave_one_schedule():
    copies, producer = a_group()
    asked = [producer.recur("put", "a", cron=f"{at} 23 * * *") for at in range(20)]
    copies.run(5_000)
    assert [producer.schedules(opaque)[0].cron for opaque in asked] == [f"{at} 23 * * *" for at in range(20)]
    assert [schedule.cron for schedule in listed(copies, producer)] == ["19 23 * * *"]


def test_repeated_put_changes_nothing():
    """Each instance of an application puts its schedules at its start: that must not move or lose an occurrence."""
    copies, producer = a_group()
    put(copies, producer, cron="*/2 * * * *", properties={"kind": "report"})
    end = copies.a.log.end
    put(copies, producer, cron="*/2 * * * *", properties={"kind": "report"})
    assert copies.a.log.end == end
    put(copies, producer, cron="*/2 * * * *", properties={"kind": "other"})
    assert copies.a.log.end > end


def test_put_loses_no_due_occurrence():
    copies, producer = a_group()
    put(copies, producer, cron="* * * * *")
    until_due(copies)
    asked = producer.recur("put", cron="*/10 * * * *")
    run_until(copies, "2023-11-14T22:20")
    assert producer.schedules(asked)[0].cron == "*/10 * * * *"
    assert times(copies) == ["2023-11-14T22:14", "2023-11-14T22:20"]


def test_delete_loses_no_due_occurrence():
    """The occurrence is due behind as many others as fire together."""
    copies, producer = a_group(tail_bytes=1 << 22)
    for at in range(FIRED_AT_ONCE):
        producer.recur("put", f"r{at}", subject="t", cron="* * * * *")
    producer.recur("put", cron="* * * * *")
    copies.run(1_000)
    until_due(copies)
    asked = producer.recur("delete")
    run_until(copies, "2023-11-14T22:16")
    assert [schedule.name for schedule in producer.schedules(asked)] == ["daily"]
    assert times(copies).count("2023-11-14T22:14") == FIRED_AT_ONCE + 1
    assert times(copies).count("2023-11-14T22:16") == FIRED_AT_ONCE


def test_deleted_schedule_sends_nothing_more():
    copies, producer = a_group()
    put(copies, producer, cron="* * * * *")
    run_until(copies, "2023-11-14T22:14")
    asked = producer.recur("delete")
    copies.run(200)
    assert [schedule.name for schedule in producer.schedules(asked)] == ["daily"]
    run_until(copies, "2023-11-14T22:18")
    copies.swap(2)
    run_until(copies, "2023-11-14T22:20")
    assert times(copies) == minutes(14, 1) and copies.a.filing.schedule.pending_messages == 0
    again = copies.producer()
    asked = again.recur("delete")
    copies.run(200)
    assert again.schedules(asked) == []


def test_schedule_is_cancelled_by_its_id():
    copies, producer = a_group()
    put(copies, producer, cron="* * * * *")
    run_until(copies, "2023-11-14T22:15")
    assert producer.cancelled("recurring:daily") == ["cancelled"]
    run_until(copies, "2023-11-14T22:20")
    assert times(copies) == minutes(14, 2) and listed(copies, producer) == []


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"cron": "every day"}, "write five"),
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"cron": "* * * * * *"}, "has 6 fields"),
        ({"timezone": "Berlin"}, "Europe/Berlin"),
        ({"timezone": "../../etc/passwd"}, "unknown here"),
        ({"name": "n" * 61}, "longer than 60"),
        ({"name": "a/b"}, "slashes"),
        ({"owner": ""}, "owner of a recurring schedule is empty"),
        ({"properties": {"x": "y" * 1000}}, "more than 1024"),
    ],
)
def test_wrong_schedule_is_refused_with_a_reason(wrong, text):
    copies, producer = a_group()
    asked = producer.recur("put", **wrong)
    copies.run(100)
    assert text in producer.text(asked) and producer.code(asked) >= 300 or producer.code(asked) == 53
    assert listed(copies, producer) == []


def test_schedules_of_a_subject_are_bounded():
    copies, producer = a_group(recurring_max=3)
    for name in "abc":
        put(copies, producer, name)
    asked = producer.recur("put", "d")
    copies.run(200)
    assert producer.code(asked) == ErrorCode.INVALID_REQUEST and "may have no more" in producer.text(asked)
    put(copies, producer, "c", cron="0 9 * * *")
    put(copies, producer, "d", subject="other")


def test_put_needs_both_copies():
    copies, producer = a_group()
    asked = producer.recur("put")
    copies.a.host.settle()
    assert not producer.answered(asked)
    copies.settle()
    assert producer.schedules(asked)
    copies.cut()
    for action, cron in (("put", "0 9 * * *"), ("delete", "")):
        asked = producer.recur(action, cron=cron)
        copies.a.host.settle()
        assert producer.code(asked) == ErrorCode.READ_ONLY
    asked = producer.recur("put")
    copies.a.host.settle()
    assert producer.schedules(asked), "the same again needs nothing to be written"
    asked = producer.recur("list", "")
    copies.a.host.settle()
    assert [schedule.name for schedule in producer.schedules(asked)] == ["daily"]


def test_marked_group_continues_and_deletes_schedules():
    copies, producer = a_group()
    put(copies, producer, cron="* * * * *")
    copies.a.master.readonly.mark_subjects(frozenset({"*"}))
    asked = producer.recur("put", "other")
    run_until(copies, "2023-11-14T22:15")
    assert producer.code(asked) == ErrorCode.READ_ONLY and times(copies) == minutes(14, 2)
    asked = producer.recur("delete")
    copies.run(200)
    assert producer.schedules(asked) and listed(copies, producer) == []


def test_schedules_continue_without_a_slave():
    copies, producer = a_group()
    put(copies, producer, cron="* * * * *")
    run_until(copies, "2023-11-14T22:14")
    copies.cut()
    run_until(copies, "2023-11-14T22:18")
    assert times(copies) == minutes(14, 5)
    copies.connect()
    run_until(copies, "2023-11-14T22:20")
    assert times(copies) == minutes(14, 7)


def a_group_whose_master_restarted_without_its_slave():
    """Group with a schedule for each minute, and a template that the slave lacks."""
    copies, producer = a_group()
    put(copies, producer, cron="* * * * *")
    copies.cut()
    run_until(copies, "2023-11-14T22:15")  # the template is now one that the slave lacks
    copies.power_fails()
    run_until(copies, "2023-11-14T22:20")
    return copies


def test_restarted_master_waits_and_sends_the_latest():
    copies = a_group_whose_master_restarted_without_its_slave()
    copies.connect()
    run_until(copies, "2023-11-14T22:21")
    assert times(copies) == [*minutes(14, 2), *minutes(20, 2)]


def test_waiting_master_refuses_puts_only():
    copies = a_group_whose_master_restarted_without_its_slave()
    producer = copies.producer()
    for cron in ("* * * * *", "0 * * * *"):
        changed, others = producer.recur(cron=cron), producer.recur("list", "", subject="other")
        copies.run(1_000)
        assert producer.code(changed) == ErrorCode.READ_ONLY and producer.schedules(others) == []


@pytest.mark.slow
def test_template_is_carried_before_deletion():
    copies, producer = a_group(retention_hours=1, segment_bytes=1 << 20)
    put(copies, producer, cron="0 8 20 11 *")
    copies.outlive_segments(producer)
    assert copies.a.log.start > 0
    assert [schedule.name for schedule in listed(copies, producer)] == ["daily"]
    copies.swap(2)
    copies.senders.stored.clear()
    copies.run(6 * 24 * HOUR_MS, step_ms=600_000)
    assert times(copies) == ["2023-11-20T08:00"]


def test_rebuilt_schedule_continues():
    copies, producer = a_group()
    put(copies, producer, cron="* * * * *")
    run_until(copies, "2023-11-14T22:15")
    copies.a.shelf = MemoryDisk()
    copies.restart()
    run_until(copies, "2023-11-14T22:18")
    assert times(copies) == minutes(14, 5)


def test_message_with_the_template_label_is_sent():
    copies, producer = a_group()
    message = delayed("s", "m", copies.now_ms)
    producer.produce_raw([message], after=encode_labels([LABEL]), flags=FLAG_LABELLED)
    copies.run(500)
    assert copies.senders.delivered() == ["m"] and listed(copies, producer) == []


def test_schedule_with_unknown_zone_waits(caplog):
    """A swap to a machine with an older list of time zones has the same effect."""
    copies, producer = a_group()
    own = {RECUR_NAME: "daily", RECUR_OWNER: "o", RECUR_CRON: "* * * * *", RECUR_ZONE: "Mars/Olympus"}
    message = with_properties(delayed("s", "recurring:daily", copies.now_ms), own)
    producer.produce_raw([message], after=encode_labels([LABEL]), flags=FLAG_LABELLED)
    put(copies, producer, "good", cron="* * * * *")
    run_until(copies, "2023-11-14T22:14")
    assert [id[:5] for id in copies.senders.delivered()] == ["good@"] and "Mars/Olympus" in caplog.text
    put(copies, producer, "daily", cron="* * * * *")
    run_until(copies, "2023-11-14T22:15")
    assert sorted(id.split("@")[0] for id in copies.senders.delivered()) == ["daily", "good", "good"]


def test_no_message_has_the_label_of_templates():
    tags = [f"tag{at}" for at in range(10)]
    data = encode_message(Message("s", id="m", tags=tags), 0)
    assert data and np.uint64(LABEL).bit_count() == 32


def test_occurrence_has_the_label_of_its_tags_and_key():
    """By it, brokers filter messages and keep their order."""
    own = {RECUR_NAME: "n", RECUR_OWNER: "o", RECUR_CRON: "* * * * *", RECUR_ZONE: "UTC"}
    message = with_properties(encode_message(Message("s", id="m", tags={"t"}, order_key="k"), 0), own)
    assert read_template(message, "s").occurrence_label() == label_of({"t"}, "k")


@pytest.mark.parametrize("action", ["delete", "list"])
def test_malformed_name_is_refused(action):
    """JSON can encode such a name; hashing it on a thread would end the process."""
    copies, producer = a_group()
    put(copies, producer)
    asked = producer.recur(action, "\ud800")
    copies.run(100)
    assert producer.code(asked) == ErrorCode.INVALID_REQUEST
    assert len(listed(copies, producer)) == 1


def test_template_and_occurrence_fit_one_frame(monkeypatch):
    monkeypatch.setattr("qmq.delayserver.templates.RECURRING_BYTES_MAX", 4_000)
    copies, producer = a_group(message_bytes_max=8192)
    asked = producer.recur("put", properties={"x": "y" * 5_000})
    copies.run(200)
    assert producer.code(asked) == ErrorCode.MESSAGE_TOO_LARGE and listed(copies, producer) == []


def test_unproducible_message_is_no_recurring_schedule():
    """This many tags set all bits of a label: an occurrence would count as a template."""
    copies, producer = a_group(message_bytes_max=8192)
    tags = [f"tag-{number}" for number in range(255)]
    message = bytearray(encode_message(Message("s", id="any"), 0))
    at = len(message) - 4
    message[0] |= FLAG_TAGS
    message[at:at] = bytes((len(tags),)) + b"".join(len(tag).to_bytes(2, "big") + tag.encode() for tag in tags)
    asked = producer.send(
        Command.RECUR, encode_recur(Recur(RecurAction.PUT, "s", "daily", "o", "* * * * *", "UTC", bytes(message)))
    )
    copies.run(200)
    assert producer.code(asked) == ErrorCode.INVALID_MESSAGE and "255 tags" in producer.text(asked)


@pytest.mark.parametrize("inner", ["t", "/", "t" * 40_000])
def test_template_of_a_foreign_subject_is_ordinary(inner):
    """Otherwise a producer of one subject could send to all; and an invalid name would end the process."""
    copies, producer = a_group(message_bytes_max=100_000)
    own = {RECUR_NAME: "daily", RECUR_OWNER: "o", RECUR_CRON: "* * * * *", RECUR_ZONE: "UTC"}
    message = with_properties(delayed(inner, "recurring:daily", copies.now_ms), own)
    producer.produce_raw([message], after=encode_labels([LABEL]), flags=FLAG_LABELLED)
    run_until(copies, "2023-11-14T22:14")
    assert copies.senders.delivered() == ["recurring:daily"], "once, as any other message of its batch"
    assert copies.a.filing.schedule.subjects == ["s"]
