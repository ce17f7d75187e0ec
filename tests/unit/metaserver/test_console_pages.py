"""Shell. Each page of the console answers its question, with data, and escapes foreign text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest

from qmq.errors import NotServed, OutcomeUnknown
from qmq.ledger import FINDINGS, Ledger
from qmq.metaserver.actions import Answer, Status
from qmq.metaserver.console import pages
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.model import MetaserverRow
from qmq.metaserver.rpc.access import wall_ms
from qmq.proto import qmq_pb2 as pb
from tests.unit.metaserver.actions_world import left
from tests.unit.metaserver.console_world import (
    DELAY_GROUP,
    DELAYED,
    LEASE,
    SCHEDULE,
    URL,
    PlayedWatchdogs,
    night,
    text_of,
)

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
async def operator(console):
    """Console of an operator, with the subject order.changed in a running group."""
    await console.log_in("operator")
    await console.serving_copies("order.changed")
    return console


async def test_consumers_behind_are_shown_with_age_and_cause(console):
    await console.serving_copies("order.changed", "quiet", groups=("g1", "g2"))
    since = wall_ms() - 3_725_000
    stuck = left("order.changed", "billing", 1234, since)
    stuck.consumers.append(pb.ConsumerProgress(consumer="c1", connected=False, unacked=0))
    stuck.causes.append("no consumer")
    gave_up = left("order.changed", "mail", 0)
    gave_up.dead_letters = 3
    ticket = left("order.changed", "ticket", 2, since)
    console.brokers.progress["g1"] = [left("quiet", "idle", 0), ticket, stuck, gave_up]
    console.brokers.progress["g2"] = [left("order.changed", "billing", 4200, since)]
    assert "messages?subject=order.changed" not in await console.see("/consumers"), "a viewer may not look at messages"
    await console.log_in("operator")
    assert "/messages?subject=order.changed&amp;dead=mail" in await console.see("/consumers")
    text = await console.read("/consumers")
    assert "order.changed billing 5,434 1 h 2 min" in text and "no consumer g1: 1,234, g2: 4,200" in text
    assert text.index("billing") < text.index("ticket") and "idle" not in text
    text = await console.read("/consumers", subject="order.changed")
    assert "billing 5,434" in text and "c1 billing g1 away – 0" in text
    assert "0 – –" in await console.read("/consumers", subject="quiet")
    console.brokers.silent = {"g1"}
    assert "No answer of g1" in await console.read("/consumers")


async def test_large_installation_is_queried_on_demand_only(console, monkeypatch):
    await console.running_copies("g1")
    monkeypatch.setattr(pages, "ASKED_MAX", 0)
    text = await console.read("/consumers")
    assert "ask all of them" in text and "No consumer group has a lag" not in text
    assert "No consumer group has a lag" in await console.read("/consumers", all="yes")


async def test_subjects_are_paged(console):
    await console.routed_copies(*[f"s{number:03d}" for number in range(150)])
    first, second = await console.see("/subjects"), await console.see("/subjects", after="s099")
    assert ("s000" in first, "s099" in first, "s100" in first, "after=s099" in first) == (True, True, False, True)
    assert ("s099<" in second, "s100<" in second, "s149<" in second, "after=" in second) == (False, True, True, False)
    found = await console.see("/subjects", prefix="s14")
    assert "s140" in found and "s100" not in found
    assert "No such subject" in await console.see("/subjects", group="g9")


async def test_trail_is_filtered_by_time_and_action(console):
    await console.copies("g1")
    await console.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    rows = await console.audit()

    async def at_five_past_two(work, **options):
        return [replace(rows[0], time_ms=1_795_356_300_000, who=HOSTILE, parameters={"brokerGroup": HOSTILE})]

    text = await console.read("/trail")
    assert "anna 10.0.0.9 MarkReadonlyBrokerGroup brokerGroup=g1" in text
    assert "No change in this time" in await console.read("/trail", until="2020-01-01T00:00")
    assert "No change in this time" in await console.read("/trail", since="2099-01-01T00:00")
    assert "MarkReadonly" not in await console.read("/trail", name="AddBroker")
    assert "yesterday is no time" in await console.read("/trail", since="yesterday")
    console.context.database.read = at_five_past_two
    page = await console.see("/trail")
    assert "2026-11-22 14:05:00" in page and "<script>" not in page


async def test_trail_period_is_half_open(console):
    await console.copies("g1")
    first, second = reversed(await console.audit())
    data = await console.done("AuditTrail", until=second.time_ms + 1, since=first.time_ms)
    assert [row["id"] for row in data["rows"]] == [second.id, first.id]
    later = await console.done("AuditTrail", until=first.time_ms)
    assert later["rows"] == []


async def test_audit_page_shows_each_night(console, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    assert "is not configured" in await console.read("/audit")
    console.served._nights = Nights(tmp_path / "ledger")
    assert "is no directory" in await console.read("/audit")
    await console.copies("g1", "g2")
    night(ledger, "g1", 1)
    night(ledger, "g1", 2)
    night(ledger, "g2", 2)
    text = await console.read("/audit")
    assert "All 2 broker groups were proven equal" in text and "g1 1970-01-01 00:00:00 proven equal 8,192" in text
    assert text.count("audit@mq1") == 3
    night(ledger, "g2", 3, FINDINGS, found={"lost": 1}, findings=[{"what": "lost", "text": HOSTILE}])
    page = await console.see("/audit")
    assert "1 of 2 broker groups" in page and "lost: 1" in page and "<script>" not in page
    (tmp_path / "ledger" / "g1.jsonl").unlink()
    (tmp_path / "ledger" / "g1.jsonl").write_bytes(b"x\n" + b"y\n")
    assert "does not match its CRC" in await console.read("/audit"), "each line that is shown is checked"


async def test_audit_page_requires_all_subjects(console):
    console.access.replace([replace(row, subjects=("order.*",)) for row in console.rows])
    assert "needs a token for all" in await console.read("/audit")
    assert "limited to some" in await console.read("/trail")


def stored(sequence, id, **properties):
    pairs = [pb.Property(name=name, value=value) for name, value in properties.items()]
    return pb.BrowsedMessage(
        sequence=sequence, id=id, stored_ms=1_000_000 * sequence, stored_bytes=40, properties=pairs
    )


async def test_messages_are_found_and_escaped(operator):
    assert "Subject" in await operator.read("/messages") and operator.brokers.browsed == []
    more = pb.BrowseAnswer(messages=[stored(9, "m-9", orderNo=HOSTILE)], begin=0, end=9)
    operator.brokers.stored = [more, pb.BrowseAnswer(messages=[stored(3, HOSTILE, long="x" * 500)])]
    page = await operator.see("/messages", subject="order.changed")
    assert page.index("m-9") < page.index("g1 / 3") and "<script>" not in page and "x" * 500 in page
    first, second = operator.brokers.browsed
    assert (first.subject, first.newest_first, first.with_properties) == ("order.changed", True, True)
    assert (second.begin, second.end) == (0, 9)
    words = {"id": "m-9", "since": "1970-01-01T00:01", "until": "1970-01-01T00:02", "tag": "pay,late"}
    assert "No such message" in await operator.read("/messages", subject="order.changed", **words)
    asked = operator.brokers.browsed[-1]
    assert (asked.id, asked.since_ms, asked.until_ms, list(asked.tags)) == ("m-9", 60_000, 120_000, ["pay", "late"])
    operator.brokers.silent = {"g1"}
    assert "No answer of g1" in await operator.read("/messages", subject="order.changed")
    assert "has no route" in await operator.read("/messages", subject="nothing")


def with_body(message, body, content_type="", size=0):
    message.body, message.body_bytes = body, size or len(body)
    if content_type:
        message.properties.add(name="qmq_contentType", value=content_type)
    return message


async def test_bodies_are_shown_and_harmless(operator):
    bodies = [
        with_body(stored(6, "m-6"), json.dumps({"a": HOSTILE}).encode(), "application/json"),
        with_body(stored(5, "m-5\u202e", n="\x9b"), "a\u202eb\x1b[2J".encode(), "text/html"),
        with_body(stored(4, "m-4"), b"%PDF\x00" * 100, "application/pdf"),
        with_body(stored(3, "m-3"), b"secret", "application/x-qmq-encrypted"),
        with_body(stored(2, "m-2"), b"[1, 2", "application/json", size=9_000),
    ]
    operator.brokers.stored = [pb.BrowseAnswer(messages=bodies)]
    page = await operator.see("/messages", subject="order.changed")
    assert HOSTILE not in page and not set("\u202e\x9b\x1b") & set(page)
    assert "<pre data-json>{&#34;a&#34;: " in page and "<pre>a\\u202eb\\u001b[2J</pre>" in page
    text = text_of(page)
    assert "Body: application/pdf, 500 bytes 000000 25 50 44 46 00" in text and "00ff" not in text
    assert "Body: encrypted, 6 bytes" in text and "secret" not in text
    assert page.count('<details class="body" open>') == 4, "short bodies are open"
    assert "[1, 2 More…" in text and text.count("More…") == 2, "dump and part of a body"
    assert 'subject=order.changed&amp;id=m-2"' in page
    operator.brokers.stored = [pb.BrowseAnswer(messages=bodies[-1:])]
    text = await operator.read("/messages", subject="order.changed", id="m-2")
    assert "qmq Browse --json --subject=order.changed --id=m-2 prints all" in text
    operator.brokers.stored = [pb.BrowseAnswer(messages=bodies[-1:])]
    text = await operator.read("/messages", subject="order.changed", id="m-2", dead="billing")
    assert "--deadLetters --group=billing --id=m-2 prints all" in text
    assert operator.brokers.browsed[-1].body_bytes_max == pages.ALONE_CHARS_MAX


async def test_dead_letters_are_shown_with_reasons(operator):
    dead = stored(1, "m-1", qmq_deadReason="ValueError: no price", qmq_times="5")
    operator.brokers.stored = [pb.BrowseAnswer(messages=[dead])]
    text = await operator.read("/messages", subject="order.changed", dead="billing")
    assert "g1 / 1 40 bytes ValueError: no price, attempts: 5" in text and "Redrive…" in text
    assert "Dead letters of billing in order.changed" in text
    assert text.count("no price") == 1 and "qmq_" not in text, "broker properties are not shown as content"
    assert operator.brokers.browsed[0].subject == "%DEAD_RETRY%order.changed%billing"


async def test_dead_letters_in_a_chosen_subject_are_shown(console):
    await console.log_in("operator")
    await console.serving_copies("order.changed", "dead")
    await console.done("LimitGroup", subject="order.changed", group="billing", deadLettersTo="dead")
    answers = [stored(number, f"m-{number}", qmq_deadReason="no price", qmq_times="5") for number in (1, 2)]
    console.brokers.stored = [pb.BrowseAnswer(messages=[answer]) for answer in answers]
    text = await console.read("/messages", subject="order.changed", dead="billing")
    assert "m-1 1970" in text and "m-2 1970" in text
    own, chosen = console.brokers.browsed
    assert (own.subject, dict(own.properties)) == ("%DEAD_RETRY%order.changed%billing", {})
    marked = {"qmq_deadSubject": "order.changed", "qmq_deadGroup": "billing"}
    assert (chosen.subject, dict(chosen.properties)) == ("dead", marked)


async def test_messages_require_the_right_to_consume(console):
    await console.serving_copies("order.changed")
    assert "this needs operator" in await console.read("/messages", subject="order.changed")
    console.access.replace([replace(row, subjects=("produce:*", "consume:pay.*")) for row in console.rows])
    await console.log_in("operator")
    assert "may not consume from" in await console.read("/messages", subject="order.changed")
    console.access.replace([replace(row, groups=("g2",)) for row in console.rows])
    assert "limited to other groups" in await console.read("/messages", subject="order.changed")
    assert console.brokers.browsed == []


async def test_delayed_page_shows_late_messages(console):
    await console.log_in("operator")
    group = DELAY_GROUP | {"dueMessages": 0, "dueAgeMs": 0, "nextDue": 1_000_000_000_000}
    group["waiting"] = [{"subject": HOSTILE, "messages": 3, "why": "no route"}]
    message, schedule = DELAYED | {"id": HOSTILE}, SCHEDULE | {"next": 1_000_000_000_000}
    hours = [{"begin": 0, "messages": 4}]

    async def answer(name, words, caller):
        data = {
            "DelayStats": {"groups": [group], "hours": hours, "unasked": {"d2": "silent"}},
            "ListDelayed": {"messages": [message], "more": True},
            "ListSchedules": {"schedules": [schedule], "more": True, "unasked": {}},
        }
        return Answer(Status.DONE, data=data[name])

    assert "no group of delay servers" in await console.read("/delayed")
    console.actions.run = answer
    page = await console.see("/delayed")
    assert "Nothing is late" in page and "No answer of d2" in page and "2001-09-09 01:46:40" in page
    assert "<script>" not in page and "/change?action=CancelDelayed" in page
    text = await console.read("/delayed")
    assert "2001-09-09 01:46:40 report nightly shop 0 3 * * * Europe/Berlin d1 end… nightly" in text
    assert "ids=recurring%3Anightly" in page and "There are more: name a subject or an owner" in text
    group |= {"dueMessages": 1500, "dueAgeMs": 61_000}
    assert "1,500 messages are due and not sent yet, the oldest for 1 min 1 s" in await console.read("/delayed")


async def test_outbox_page_shows_no_passwords(console):
    assert "No database is registered" in await console.read("/outbox")
    words = {"host": "db1", "port": 3306, "username": "qmq", "password": "secret of db1"}
    await console.done("AddDb", **words)
    page = await console.see("/outbox")
    assert "mmm://db1:3306" in page and "secret" not in page


async def test_parked_rows_are_retried_by_a_confirmed_change(console):
    await console.log_in("operator")
    console.actions._context = replace(console.context, watchdogs=(watchdogs := PlayedWatchdogs(HOSTILE)))
    assert "No watchdog was ever active" in await console.read("/outbox")
    await console.database.write(lambda repository: repository.hold_lease(LEASE, take=True, release=False))
    text = await console.read("/outbox")
    assert "1 parked: not sent before a retry" in text and f"order.new m-1 {HOSTILE} retry… row 17" in text
    page = await console.see("/outbox")
    assert "<script>" not in page and "action=OutboxRetry" in page and "ids=17" in page
    assert watchdogs.asked[-1] == ("10.0.0.7:8083", "/outbox/stuck", False)
    words = {"csrf": await console.csrf(), "action": "OutboxRetry", "database": URL, "ids": "17"}
    planned = text_of((await console.send("/change", step="plan", **words)).text)
    assert f"parked.{URL} 1" in planned and "sentAgain" in planned and "Do it" in planned
    assert all(not changes for *_, changes in watchdogs.asked)
    assert "Done." in (await console.send("/change", step="confirm", **words)).text
    assert watchdogs.asked[-1] == ("10.0.0.7:8083", "/outbox/retry", True)
    newest, before = (await console.audit())[:2]
    assert (newest.action, newest.result, newest.after) == (
        "OutboxRetry",
        "done",
        {"retried": {URL: 1}, "notAsked": {}},
    )
    assert before.result == "begun"
    await console.log_in("viewer")
    assert "OutboxRetry" not in await console.see("/outbox")


async def test_retry_reports_its_outcome(console):
    console.actions._context = replace(console.context, watchdogs=(watchdogs := PlayedWatchdogs(HOSTILE)))
    words = {"database": URL, "ids": "17"}
    assert "was ever active" in (await console.run("OutboxRetry", **words)).message
    await console.database.write(lambda repository: repository.hold_lease(LEASE, take=True, release=False))
    assert "name it" in await console.refused("OutboxRetry", ids="17")
    for ids in ("a", ","):
        assert "whole numbers" in await console.refused("OutboxRetry", database=URL, ids=ids), "not all that are parked"
    for error, status, result in (
        (NotServed("silent"), Status.WAIT, "failed"),
        (OutcomeUnknown("lost"), Status.UNKNOWN, "unknown"),
    ):
        watchdogs.fails = error
        assert (await console.run("OutboxRetry", **words)).status == status
        assert (await console.audit())[0].result == result
    watchdogs.fails, watchdogs.answer = None, {"database": URL, "problem": "too slow"}
    answer = await console.run("OutboxRetry", **words)
    assert answer.status == Status.UNKNOWN and "too slow" in answer.message
    assert (await console.audit())[0].result == "partly done"


async def test_group_page_draws_rates(console):
    await console.running_copies("g1")
    text = await console.read("/group", name="g1")
    assert "Its master has just begun" in text
    now = wall_ms()
    samples = [pb.RateSample(at_ms=now - 5_000 * (9 - n), taken=250 * n, delivered=10 * n) for n in range(10)]
    console.brokers.samples["g1"] = samples
    with patch.object(pages, "wall_ms", lambda: now):  # the chart moves with time, and two are compared
        page = await console.see("/group", name="g1")
        part = await console.browser.get("/console/rates?brokerGroup=g1")
    assert "messages in: 50.0 messages out: 2.0" in text_of(page) and page.count("<polyline") == 2
    assert 'data-renew="/console/rates?brokerGroup=g1"' in page and "100 at the upper edge" not in page
    assert part.text.strip().startswith("<ul") and part.text.strip() in page
    data = await console.done("Rates", brokerGroup="g1")
    assert data["rates"][-1] == {"at": now, "taken": 50.0, "delivered": 2.0} and len(data["rates"]) == 9
    console.brokers.silent = {"g1"}
    assert "No rates: " in (await console.browser.get("/console/rates?brokerGroup=g1")).text
    assert (await console.new_browser().get("/console/rates?brokerGroup=g1")).status_code == 401


async def test_consumers_page_draws_rates(console):
    await console.serving_copies("s", groups=("g1", "g2"))
    looked, began = [], wall_ms() - 60_000
    note = console.served._readings.note

    def five_seconds_later(subject, look):
        looked.append(look)
        return note(subject, look._replace(at_ms=began + 5_000 * len(looked)))

    console.served._readings.note = five_seconds_later
    for step in range(3):
        console.brokers.progress = {
            group: [pb.GroupProgress(subject="s", group="billing", next_sequence=100 * step, lag=50 * step)]
            for group in ("g1", "g2")
        }
        text = await console.read("/consumers", subject="s")
        assert ("Counting begins now" in text) == (step == 0)
    assert "messages in: 40.0 billing: 20.0" in text
    console.brokers.silent = {"g2"}
    assert "No rates: not every broker group answers" in await console.read("/consumers", subject="s")


async def test_tail_shows_the_newest_messages_bounded(console):
    await console.serving_copies("order.changed")
    assert (await console.new_browser().get("/console/tail?subject=order.changed")).status_code == 401
    await console.log_in("operator")
    many = [stored(number, f"m-{number}", text="x" * 60_000) for number in range(50, 0, -1)]
    many = [with_body(message, b"y" * 20_000, size=90_000) for message in many]
    console.brokers.stored = [pb.BrowseAnswer(messages=many)]
    page = (await console.browser.get("/console/tail?subject=order.changed")).text
    assert page.count("<li data-key") == 50 and len(page) < pages.PAGE_CHARS_MAX + 60_000
    assert page.index("g1/50") < page.index("g1/49") and "characters more" in page
    assert console.brokers.browsed[-1].newest_first and console.brokers.browsed[-1].messages_max == pages.TAIL
    await console.browser.get("/console/tail", params={"subject": "order.changed", "property": "a=b"})
    assert console.brokers.browsed[-1].since_ms > 0, "a filter looks through the last seconds only"
    console.brokers.stored = [pb.BrowseAnswer(messages=[stored(1, HOSTILE, a=HOSTILE)])]
    assert HOSTILE not in (await console.browser.get("/console/tail?subject=order.changed")).text


async def test_each_connection_has_its_rate(console):
    await console.serving_copies("s")
    begin_ms = wall_ms() - 60_000
    note, times = console.served._readings.note, iter(range(begin_ms, begin_ms + 10**6, 5_000))
    console.served._readings.note = lambda key, reading: note(key, reading._replace(at_ms=next(times)))
    for delivered in (100, 150):
        row = pb.GroupProgress(subject="s", group="billing", next_sequence=9)
        row.consumers.append(pb.ConsumerProgress(consumer="c1", connected=True, peer="10.0.0.7:5", delivered=delivered))
        console.brokers.progress = {"g1": [row]}
        text = await console.read("/consumers", subject="s")
    assert "c1 billing g1 10.0.0.7:5 5.0 0 on" in text


async def test_subject_page_draws_its_lag(console):
    await console.serving_copies("s")
    console.brokers.progress = {"g1": [left("s", "billing", 40, wall_ms() - 9_000)]}
    await console.done("SetLimits", subject="s", expiresAfterS=3600)
    for minutes in (0, 1):
        console.surveyor.history.record(("lag", "s", "billing"), wall_ms() - 60_000 * (1 - minutes), 40 + minutes)
    page = await console.see("/consumers", subject="s", group="billing")
    assert "Lag in messages in the last" in page and "Consumer group of" in page
    assert "expire after 1 h" in text_of(page) and "billing: 41" in text_of(page)


async def test_subject_page_shows_its_size_and_producers(console, monkeypatch):
    await console.serving_copies("s")
    console.brokers.progress = {"g1": [left("s", "billing", 40)]}
    console.brokers.subject_bytes = 5_210_000
    shop = pb.ProducerProgress(app="shop", peer="10.0.0.5:4711", messages=100)
    console.brokers.producers = [pb.ProducerProgress(app="cron", peer="10.0.0.6:1", messages=7), shop]
    now = [wall_ms()]
    monkeypatch.setattr("qmq.metaserver.console.pages.wall_ms", lambda: now[0])
    assert "Size of each copy 5.21 MB" in await console.read("/consumers", subject="s")
    shop.messages, now[0] = 400, now[0] + 10_000
    answer = await console.browser.get("/console/rates", params={"subject": "s"})
    text = text_of(answer.text)
    assert "10.0.0.5:4711 shop g1 30.0 400 10.0.0.6:1 cron g1 0.0 7" in text
    assert "shop" not in await console.read("/consumers", subject="s", group="billing"), "they produce for all groups"


async def test_definitions_are_exported_and_imported(console):
    await console.log_in("operator")
    assert "this needs admin" in await console.read("/definitions")
    assert (await console.browser.get("/console/definitions.json")).status_code == 403
    await console.log_in("admin")
    await console.serving_copies("order.changed")
    assert "Broker groups 1" in await console.read("/definitions")
    sent = await console.browser.get("/console/definitions.json")
    assert (
        "attachment" in sent.headers["content-disposition"] and sent.json()["routes"][0]["subject"] == "order.changed"
    )
    document = json.dumps(sent.json() | {"subjects": [{"name": "pay", "tag": "fast"}]})
    words = {"csrf": await console.csrf(), "action": "ImportDefinitions", "definitions": document}
    planned = await console.send("/change", step="plan", **words)
    assert "Reaches 1 subject" in text_of(planned.text) and "pay" not in console.registry.directory.subjects
    shown = re.search(r'name="plan" value="(\w+)"', planned.text)[1]
    assert "Done." in text_of((await console.send("/change", step="confirm", plan=shown, **words)).text)
    assert console.registry.directory.subjects["pay"].tag == "fast"


async def test_settings_show_values_that_differ(console):
    assert "this needs operator" in await console.read("/settings")
    await console.log_in("operator")
    await console.running_copies("g1")
    console.actions._context = replace(
        console.context, settings={"cluster_token": "set, not shown", "host": "10.0.0.1"}
    )
    text = await console.read("/settings")
    assert "lease_ms 10000" in text and "hostname g1-a g1-a:20881 g1-b g1-b:20881" in text
    assert "cluster_token set, not shown" in text and "host 10.0.0.1" in text
    console.stop("g1-b")
    assert "g1-b:20881 did not answer" in await console.read("/settings", group="g1")


async def test_settings_of_other_metaservers_and_watchdogs_are_shown(console, monkeypatch):
    await console.log_in("operator")
    await console.running_copies("g1")
    await console.database.write(lambda repository: repository.hold_lease(LEASE, take=True, release=False))
    other, silent = (MetaserverRow(name, f"{name}:8080", f"{name}:8081", 1, "0.3.0") for name in ("m2", "m3"))
    own = {"processes": [{"process": "m2:8080", "kind": "metaserver", "settings": {"poll_ms": "99"}}]}

    def fetch(row, words):
        if row is silent:
            raise OSError("no route to host")
        return own if words == {"action": "Settings", "here": "true"} else {}

    monkeypatch.setattr(console.clients, "_others", lambda: [other, silent])
    monkeypatch.setattr(console.clients, "_fetch", fetch)
    settings = {"poll_ms": "250", "cluster": "shop"}
    console.actions._context = replace(console.context, settings=settings, watchdogs=PlayedWatchdogs(""))
    text = await console.read("/settings")
    assert "poll_ms 99 m2:8080 250 this metaserver" in text and "cluster shop" in text
    assert "Watchdog Setting Value room default token set, not shown" in text and "m3:8080 did not answer" in text
    shown = await console.done("Settings", here="true")
    assert [process["settings"] for process in shown["processes"]] == [settings]


async def test_tokens_are_listed_and_revoked(console):
    await console.log_in("operator")
    assert "this needs admin" in await console.read("/tokens")
    await console.log_in("admin")
    for number in range(120):
        await console.done("AddToken", name=f"shop{number:03d}", role="client", subjects="order.*")
    page = await console.see("/tokens")
    assert "shop000" in page and "shop119" not in page and "action=RevokeToken" in page
    assert "shop119" in await console.see("/tokens", page="1")
    assert "shop000" in text_of(page) and "valid client order.* all" in text_of(page)


WORDS = {
    "": ("page", "state", "name"),
    "/group": ("name",),
    "/subjects": ("prefix", "after", "group"),
    "/consumers": ("subject", "group", "all"),
    "/messages": ("subject", "id", "tag", "since", "until", "dead", "sequence", "brokerGroup", "property", "live"),
    "/delayed": ("subject", "since", "until", "owner"),
    "/outbox": ("room", "database"),
    "/trail": ("who", "name", "before", "since", "until", "subject", "request", "brokerGroup"),
    "/audit": ("group",),
    "/settings": ("group",),
    "/tokens": ("page",),
    "/change": ("action", "subject", "brokerGroup"),
}
NONSENSE = ("-1", "9" * 23, "NaN", "1e9", "0x10", "٣", "%00", "\0", HOSTILE, "a" * 3000, "' OR 1=1", "\ud7ff")


async def test_any_parameter_yields_a_whole_escaped_page(operator):
    for path, names in WORDS.items():
        for name, word in product(names, NONSENSE):
            words = {"subject": "order.changed", name: word} if path == "/messages" else {name: word}
            answer = await operator.browser.get(f"/console{path}", params=words)
            assert answer.status_code < 500 and answer.text.rstrip().endswith("</html>"), (path, name, word)
            assert HOSTILE not in answer.text, (path, name)
