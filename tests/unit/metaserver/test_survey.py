"""Shell. Survey for the console: figures of every process, totals, history, and what burns."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from qmq.dead_letters import REDRIVER
from qmq.metaserver.console import findings, front, survey
from qmq.metaserver.console.findings import Movements, Progress, of_dead_letters, of_late, of_subjects, shortened
from qmq.metaserver.console.front import LONG_MS, RECENT, RECENT_MS, History, Ring
from qmq.metaserver.console.survey import Surveyor, closed_subjects, figures_of, parked_of, rates_of
from qmq.process_metrics import process_figures
from qmq.proto import qmq_pb2 as pb
from qmq.subjects import dead_letter_subject
from tests.unit.metaserver.actions_world import left


@pytest.fixture
def surveyor(world):
    return Surveyor(world.context, token="t")


async def test_survey_sums_the_cluster(world, surveyor):
    await world.running_copies("g1", "g2")
    held = left("s", "billing", 5, 1, dead=2)
    held.consumers.append(pb.ConsumerProgress(consumer="c1", connected=True, unacked=3))
    world.brokers.progress = {"g1": [held], "g2": [left("s", "billing", 7)]}
    world.brokers.samples["g1"] = [
        pb.RateSample(at_ms=0, taken=0),
        pb.RateSample(at_ms=10_000, taken=500, delivered=40, acked=30),
    ]
    found = await surveyor.look()
    assert {name: found.totals[name] for name in ("in", "out", "acked")} == {"in": 50.0, "out": 4.0, "acked": 3.0}
    assert (found.totals["lag"], found.totals["unacked"], found.totals["dead"]) == (12, 3, 2)
    assert [finding.text for finding in found.findings] == ["2 dead letters of billing"]
    assert surveyor.history.recent("lag", "s", "billing")[0][1] == 12
    world.brokers.progress = {}
    await surveyor.look()
    assert surveyor.history.recent("lag", "s", "billing")[-1][1] in (0, 12), "the highest of ten seconds"


async def test_totals_count_groups_that_are_not_listed(cluster, surveyor):
    cluster.brokers.progress = {"g1": [left("s", "billing", 5, 1)]}
    cluster.brokers.sums = pb.GroupSums(groups=900, lag=1_000, unacked=30, dead_letters=7)
    totals = (await surveyor.look()).totals
    assert (totals["lag"], totals["unacked"], totals["dead"]) == (1_000, 30, 7)


async def test_groups_that_are_not_listed_keep_their_lag(cluster, surveyor, monkeypatch):
    monkeypatch.setattr(survey, "GROUPS_MAX", 2)
    for hour, (lags, expected) in enumerate((((9, 8), 8), ((9, 0, 8), 8), ((9,), 0))):
        cluster.brokers.progress = {"g1": [left("s", f"c{at}", lag) for at, lag in enumerate(lags)]}
        monkeypatch.setattr(survey, "wall_ms", partial(int, hour * 3_600_000))
        await surveyor.look()
        assert surveyor.history.long("lag", "s", "c1")[-1][1] == expected


async def test_redrives_of_older_brokers_are_no_groups(cluster, surveyor):
    cluster.brokers.progress = {"g1": [left("s", "g", 0, dead=3), left(dead_letter_subject("s", "g"), REDRIVER, 3)]}
    found = await surveyor.look()
    assert (found.totals["lag"], found.totals["dead"]) == (0, 3)


async def test_rounds_are_rare_while_no_page_is_open(surveyor, monkeypatch):
    """Each round costs a master of 100,000 consumer groups half a second."""
    never = time.monotonic() + 3600
    waiting = asyncio.create_task(surveyor._until_seen(never))
    await asyncio.sleep(0)
    assert not waiting.done()
    surveyor.see()
    await waiting
    await surveyor._until_seen(never)  # the page is still open
    monkeypatch.setattr(survey, "SEEN_S", 0.0)
    await surveyor._until_seen(time.monotonic())  # the history's turn


async def test_old_survey_is_not_shown(surveyor, monkeypatch):
    """The first page after a quiet hour showed findings of five minutes ago."""
    found = await surveyor.look()
    assert surveyor.see() is found
    found.at_ms -= int(survey.SEEN_S * 1000) + 5_000
    assert surveyor.see() is None
    found.took_s = 10.0
    assert surveyor.see() is found, "a large installation's round takes minutes"


async def test_survey_names_silent_masters(cluster, surveyor):
    cluster.brokers.silent = {"g1"}
    found = await surveyor.look()
    assert found.unasked == ["g1"] and [process.version for process in found.processes] == ["", ""]


async def test_stopped_broker_is_down_in_the_survey(cluster, surveyor):
    cluster.stop("g1-b")
    found = await surveyor.look()
    assert [process.up for process in found.processes] == [True, False]
    assert any("g1-b:20881" in finding.text for finding in found.findings)


async def test_subject_without_an_open_group_is_found(world):
    await world.running_copies("g1", "g2")
    await world.routed("shop", groups=("g1",))
    await world.routed("wide", groups=("g1", "g2"))
    registry = world.registry

    async def closed(takes):
        return await closed_subjects(registry.directory, registry.routes, takes)

    assert await closed({"g1", "g2"}) == ([], 0)
    assert await closed({"g2"}) == (["shop"], 1)
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="shop")
    assert await closed({"g1", "g2"}) == (["shop"], 1)
    for number in range(findings.LISTED_MAX + 3):
        await world.routed(f"shop.{number}", groups=("g1",))
    names, count = await closed({"g2"})
    assert len(names) == findings.LISTED_MAX and count == findings.LISTED_MAX + 4
    assert shortened(of_subjects(names, count))[-1].text == "and 4 more: subjects"


def test_rates_are_means_of_the_newest_samples():
    def sample(at_ms, taken):
        return pb.RateSample(at_ms=at_ms, taken=taken)

    assert rates_of([sample(0, 0), sample(90_000, 100), sample(100_000, 200)])["in"] == 10.0
    assert rates_of([sample(0, 900), sample(10_000, 3)])["in"] == 0.0, "a restarted counter"
    assert rates_of([sample(5, 3)])["in"] == rates_of([])["in"] == 0.0


def test_group_stands_still_after_a_minute():
    movements, row = Movements(), Progress("s", "billing", messages=5, done=9, causes=["no_consumer"])
    assert movements.look([("g1", row)], 0) == movements.look([("g1", row)], findings.STALLED_MS - 1) == []
    (finding,) = movements.look([("g1", row)], findings.STALLED_MS)
    assert finding.text == "billing stands still" and "no consumer" in finding.detail
    row.done += 1
    assert movements.look([("g1", row)], findings.STALLED_MS + 1) == []


def test_group_stands_still_on_one_broker_group():
    """Sums over broker groups move as long as one of them does."""
    movements = Movements()

    def look(at_ms):
        stuck, moving = Progress("s", "billing", messages=5, done=9), Progress("s", "billing", messages=7, done=at_ms)
        return movements.look([("g1", stuck), ("g2", moving), ("g3", stuck)], at_ms)

    look(0)
    (finding,) = look(findings.STALLED_MS)
    assert finding.detail == "s on g1, g3: 10 messages not acked, and none was for 60 s"


def test_hung_handler_is_found_in_a_busy_group():
    """By the age of the oldest message, a consumer hung that worked through a batch of one moment."""
    movements = Movements()

    def look(at_ms, **more):
        return movements.look([("g1", Progress("s", "g", messages=9, done=at_ms, oldest_ms=7, **more))], at_ms)

    assert look(0) == look(findings.HUNG_MS) == []
    (finding,) = look(findings.HUNG_MS + 1, first_unacked_ms=findings.HUNG_MS)
    assert (finding.kind, finding.detail) == (
        "handlers",
        "s on g1: a consumer has had the same first message for 2 min",
    )


@pytest.mark.parametrize("cause", ["later", "away"])
def test_postponed_messages_and_left_broadcasts_are_no_findings(cause):
    movements = Movements()
    row = Progress("s", "g", messages=1, causes=["no_consumer", cause])
    assert movements.look([("g1", row)], 0) == movements.look([("g1", row)], 10 * findings.STALLED_MS) == []


def test_findings_are_bounded_per_kind():
    rows = [Progress("s", f"g{number}", dead_letters=number) for number in range(9)]
    found = shortened(of_dead_letters(rows))
    assert [finding.text for finding in found][-1] == "and 3 more: dead letters" and len(found) == 6
    assert found[0].text == "8 dead letters of g8"
    assert of_late({"d1": (3, findings.LATE_MS - 1), "d2": (0, 0)}) == []
    assert of_late({"d1": (1, 61_000)})[0].detail == "d1: the oldest was due 61 s ago"


def test_ring_keeps_the_highest_of_each_slot():
    ring = Ring(RECENT_MS, RECENT)
    for at_ms, value in ((100_000, 1.0), (101_000, 5.0), (102_000, 2.0), (130_000, 3.0), (90_000, 9.0)):
        ring.record(at_ms, value)
    assert ring.points() == [(100_000, 5.0), (130_000, 3.0)]
    ring.record(130_000 + RECENT * RECENT_MS, 4.0)
    assert [value for _, value in ring.points()] == [4.0], "older values have left"


def test_history_is_bounded_in_series():
    history = History(series_max=3)
    for number in range(5):
        history.record(("lag", "s", f"g{number}"), 0, number)
    assert history.recent("lag", "s", "g1") == [] and history.long("lag", "s", "g4") == [(0, 4.0)]
    history.settle("lag", [("lag", "s", "g4")], LONG_MS)
    assert history.long("lag", "s", "g3")[-1] == (LONG_MS, 0.0) and len(history.long("lag", "s", "g4")) == 1
    history.record(("lag", "s", "g4"), RECENT * RECENT_MS + LONG_MS, 1.0)
    assert history.long("lag", "s", "g4") == [(0, 4.0), (RECENT * RECENT_MS + LONG_MS, 1.0)], "the older hours are kept"


def test_figures_are_read_from_a_page_of_metrics():
    page = (
        'process_resident_memory_bytes 5.0e+06\nprocess_cpu_seconds_total 2.5\nqmq_watchdog_info{version="0.3.0"} 1.0\n'
    )
    found = figures_of(page)
    assert (found.version, found.memory_bytes, found.cpu_seconds) == ("0.3.0", 5_000_000, 2.5)
    assert figures_of("").version == ""


async def test_parked_rows_are_findings(surveyor, monkeypatch):
    row = 'qmq_watchdog_rows{database="%s",state="%s"} %s\n'
    page = row % ("mysql://a/b", "parked", "2.0") + row % ("mysql://c", "parked", "0.0") + row % ("x", "pending", "9.0")
    pages = [page, ""]

    async def one_watchdog(context):
        return ["10.0.0.7:1"]

    monkeypatch.setattr(survey, "active_watchdogs", one_watchdog)
    monkeypatch.setattr(surveyor, "_scrape", lambda address: pages.pop(0))
    found = [finding for finding in (await surveyor.look()).findings if finding.kind == "parked rows"]
    assert [(finding.text, finding.detail) for finding in found] == [
        ("2 parked rows of an outbox", "mysql://a/b: not sent before OutboxRetry")
    ]
    after = await surveyor.look()
    assert "parked rows" not in {finding.kind for finding in after.findings}, "its watchdog does not answer"
    assert [process.up for process in after.processes if process.kind == "watchdog"] == [False]


def test_database_names_are_read_as_written():
    page = 'qmq_watchdog_rows{database="a\\"b\\\\c",state="parked"} 3.0'
    assert parked_of(page) == {'a"b\\c': 3}


def test_process_reports_its_own_figures(tmp_path):
    found = process_figures(tmp_path)
    assert found.version and found.memory_bytes and 0 < found.disk_free_bytes <= found.disk_bytes
    assert process_figures(tmp_path / "missing").disk_bytes == 0


def test_low_disk_and_mixed_versions_are_marked():
    processes = [
        front.Process("broker", "a", "g1", "master", True, "0.3.0", disk_free_bytes=10, disk_bytes=100),
        front.Process("broker", "b", "g1", "slave", True, "0.2.0", disk_free_bytes=90, disk_bytes=100),
    ]
    rows = front.front_of(survey.Survey(0, processes=processes), History(), [], 0)["processes"]
    assert [row["is_low"] for row in rows] == [True, False] and all(row["versions_differ"] for row in rows)


async def test_large_installation_is_asked_in_pieces(monkeypatch):
    pauses = []

    async def slept(seconds):
        pauses.append(seconds)

    async def ask(number):
        return number

    monkeypatch.setattr(survey.asyncio, "sleep", slept)
    assert await survey.in_pieces(range(70), ask) == list(range(70))
    assert len(pauses) == 2 and all(0 <= pause <= survey.PAUSE_S_MAX for pause in pauses)
