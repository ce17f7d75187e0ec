"""Shell. Doctor: one finding for each cause, in the tool's lines, in the metrics, and at `/api/doctor`.

The metaserver's checks are real, on a group `g1` with the master g1-a and the slave g1-b. Ports and metrics pages of
brokers are given as text.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from qmq.errors import OperatorError
from qmq.metaserver.actions.causes import CheckKind
from qmq.metaserver.actions.doctor import examine_reported
from qmq.metaserver.model import Broker, BrokerKey, MetaserverRow, PartedTail, ReplicaState
from qmq.metaserver.observability.collectors import DoctorMetrics
from qmq.metaserver.storage.database import DatabaseAway
from qmq.rights import TokenRole
from qmq.tools import doctor
from qmq.tools.call import Answer, Exit
from qmq.tools.findings import Level
from qmq.types import Role
from tests.unit.metaserver.actions_world import place

OTHER = MetaserverRow("m2", "10.0.0.2:8080", "10.0.0.2:8081", beat=1, version="0.3.0")
GIB = 1 << 30


def metrics(*, master=False, version="0.3.0", free=10 * GIB, kind="broker", **more):
    """Return a metrics page; the name of a metric without its prefix -> value; `labels` in the name."""
    lines = {f'info{{version="{version}"}}': 1, "is_master": int(master), "disk_free_bytes": free}
    lines |= {"disk_free_limit_bytes": GIB} | more
    return "".join(f"qmq_{kind}_{name} {float(value)}\n" for name, value in lines.items())


def ahead(**seconds):
    return {f'clock_ahead_seconds{{of="{clock.replace("_", " ", 1)}"}}': value for clock, value in seconds.items()}


WELL = {"g1-a": metrics(master=True), "g1-b": metrics()}


async def nothing(world):
    """Leave the installation healthy."""


async def other_stops(world):
    for rows in ([OTHER], []):
        world.liveness.peers.read(rows, now_ms=world.registry.now_ms())


async def other_is_silent(world):
    for ago_ms in (8000, 6000, 4000, 2000, 0):
        world.liveness.peers.read([OTHER], now_ms=world.registry.now_ms() - ago_ms)


async def other_was_killed_and_restarted(world):
    for ago_ms in (8000, 6000, 4000, 2000, 0):
        again = replace(OTHER, id="m3", beat=10_000 - ago_ms)
        world.liveness.peers.read([OTHER, again], now_ms=world.registry.now_ms() - ago_ms)


async def database_away(world):
    async def away(*_, **__):
        raise DatabaseAway("killed")

    world.registry.mirror.catch_up = world.database.read = away
    world.liveness.peers.read([], now_ms=world.registry.now_ms() - 60_000)


async def slave_killed(world):
    world.stop("g1-b")
    world.beat("g1-a", writable=False, readonly_reasons=("slave_down",))


async def master_killed(world):
    world.stop("g1-a")


async def both_killed(world):
    world.stop("g1-a")
    world.stop("g1-b")


def readonly(*reasons, slave=(), **more):
    async def spoil(world):
        world.beat("g1-a", writable=not reasons, readonly_reasons=reasons)
        world.beat("g1-b", readonly_reasons=slave, **more)

    return spoil


async def marked(world):
    world.beat("g1-a", writable=False, readonly_reasons=("operator",))
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")


async def token_ends(world):
    await world.done("AddToken", name="ending", role="client", days=3)


async def client_refused(world):
    world.refusals["shop"] = "token 'shop' has 3 watches, the most that one token may have"


async def client_refused_elsewhere(world):
    refusals = {"routes": ["token 'shop' has 3 watches"], "brokers": {"g1-b:20881": "a copy of its directory"}}
    world.clients._others, world.clients._fetch = lambda: [OTHER], lambda *_: {"refusals": refusals}


async def slave_behind(world):
    world.beat("g1-a", log_end=GIB)
    world.beat("g1-b", log_end=0)


def never_registered(world):
    return world.copies("g2")


async def no_slave(world):
    world.stop("g1-b")
    await world.done("RemoveBroker", hostname="g1-b", servePort=20881, force="true")
    world.beat("g1-a")  # it reports the new term


async def report_unplaced(world, group, *hostnames):
    """Brokers with the log of a group register without a place in its row."""
    for term, hostname in enumerate(hostnames, 1):
        ports = 20881, 20882, 20883, 20884
        broker = Broker(group, Role.SLAVE, hostname, "10.0.0.1", *ports, incarnation=f"disk of {hostname}")
        with pytest.raises(OperatorError, match=f"AddBroker .*--hostname={hostname}"):
            await world.registry.registration.register(broker, lambda question: asyncio.sleep(0), term=term)


async def test_copy_with_most_of_the_log_becomes_the_master(cluster):
    """The group's row is lost, and with it each acknowledged point: a newer row alone proves no frames."""
    await report_unplaced(cluster, "g7", "g7-a", "g7-b", "g7-c")
    words = {hostname: place("g7", "0", hostname) for hostname in ("g7-a", "g7-b", "g7-d")}
    for hostname, end in ("g7-a", 900), ("g7-b", 500):
        state = ReplicaState(Role.SLAVE, 1, last_term=1, last_boot=1, flushed_end=end)
        cluster.brokers.states[BrokerKey(hostname, 20881)] = state
    assert "g7-c:20881 has a log of g7 and does not answer" in await cluster.refused("AddBroker", **words["g7-a"])
    cluster.brokers.states[BrokerKey("g7-c", 20881)] = ReplicaState(Role.SLAVE, 1, last_term=1, last_boot=1)
    for hostname in ("g7-b", "g7-d"):
        refusal = await cluster.refused("AddBroker", **words[hostname])
        assert f"g7-a:20881 has more of the log of g7 than {hostname}:20881: qmq AddBroker" in refusal
    (check,) = [check for check in (await cluster.done("Doctor"))["checks"] if "has no row" in check["found"]]
    assert "g7-a:20881, g7-b:20881, g7-c:20881 have its log" in check["found"]
    await cluster.done("AddBroker", **words["g7-a"])
    await cluster.done("AddBroker", **place("g7", "1", "g7-b"))


async def slave_without_a_place(world):
    await no_slave(world)
    await report_unplaced(world, "g1", "g1-b")


async def group_without_a_row(world):
    await report_unplaced(world, "g7", "g7-a", "g7-b")


@dataclass(frozen=True)
class Situation:
    name: str
    spoil: Any = nothing
    pages: Any = None
    """Metrics pages that differ."""
    verdict: tuple[str, ...] = ()
    """Level, step and finding of each line that is not OK."""
    remedy: str = ""
    """Part of a remedy."""
    fine: tuple[str, ...] = ()
    """Some of the lines that are OK."""


SITUATIONS = [
    Situation(
        "healthy",
        fine=(
            "token: anna, with the role admin",
            "metaservers: 1 up",
            "versions: all run 0.3.0",
            "copies: the slave of g1 is in sync",
        ),
    ),
    Situation("another metaserver was stopped", other_stops, verdict=("WARN metaservers: stopped: 10.0.0.2:8080",)),
    Situation("another metaserver is silent", other_is_silent, verdict=("WARN metaservers: silent: 10.0.0.2:8080",)),
    Situation("another metaserver was killed and restarted", other_was_killed_and_restarted),
    Situation(
        "database away",
        database_away,
        verdict=(
            "FAIL database: the database does not answer: new subjects, consumer groups and role changes "
            "wait; known routes continue (killed)",
        ),
        fine=("metaservers: this one answers; without the database the others are unknown",),
    ),
    Situation(
        "no broker of a group registered yet",
        never_registered,
        verdict=(
            "FAIL brokers: g2-a:20881 (MASTER of g2) never registered",
            "FAIL brokers: g2-b:20881 (SLAVE of g2) never registered",
        ),
    ),
    Situation("no slave", no_slave, verdict=("FAIL groups: g1 has no slave",), remedy="AddBroker adds a slave"),
    Situation(
        "slave without a place",
        slave_without_a_place,
        verdict=("FAIL groups: g1 has no slave, but g1-b:20881 has its log and no place",),
        remedy="keep their data directories, and return the brokers to their places: "
        "qmq AddBroker --brokerGroup=g1 --role=1 --hostname=g1-b",
    ),
    Situation(
        "group without a row",
        group_without_a_row,
        verdict=("FAIL groups: g7 has no row, but g7-b:20881, g7-a:20881 have its log and no place",),
        remedy="qmq AddBroker --brokerGroup=g7 --role=0 --hostname=g7-b --ip=10.0.0.1 --servePort=20881 "
        "--syncPort=20882, then qmq AddBroker --brokerGroup=g7 --role=1 --hostname=g7-a",
    ),
    Situation(
        "slave killed",
        slave_killed,
        verdict=("FAIL brokers: g1-b:20881 (SLAVE of g1) did not answer at 10.0.0.1:20883",),
    ),
    Situation(
        "master killed",
        master_killed,
        verdict=("FAIL brokers: g1-a:20881 (MASTER of g1) did not answer at 10.0.0.1:20883",),
    ),
    Situation(
        "both brokers of a machine killed",
        both_killed,
        verdict=(
            "FAIL brokers: machine 10.0.0.1: none of its brokers answers: g1-a:20881 (MASTER of g1), "
            "g1-b:20881 (SLAVE of g1)",
        ),
    ),
    Situation(
        "the slave's disk is full",
        readonly("disk"),
        {"g1-b": metrics(free=GIB // 2)},
        verdict=(
            "FAIL brokers: g1-a:20881 (MASTER of g1) rejects produces: disk",
            "FAIL disks: g1-b:20881 (slave of g1) has 512.0 MiB free; it stops taking messages below 1.0 GiB",
        ),
    ),
    Situation(
        "the master's disk is full",
        readonly("disk"),
        {"g1-a": metrics(master=True, free=GIB // 2)},
        verdict=(
            "FAIL brokers: g1-a:20881 (MASTER of g1) rejects produces: disk",
            "FAIL disks: g1-a:20881 (master of g1) has 512.0 MiB free; it stops taking messages below 1.0 GiB",
        ),
    ),
    Situation(
        "the slave's clock is ahead",
        pages={
            "g1-a": metrics(master=True, clocks_disagree=1, **ahead(metaserver=0.1, slave_b2=-60)),
            "g1-b": metrics(clocks_disagree=1, **ahead(metaserver=60.1, master=60)),
        },
        verdict=(
            "FAIL clocks: the clock of the slave b2 is 60 s ahead of those of g1-a:20881 (master of g1) "
            "and of the metaserver: nothing is deleted",
            "FAIL clocks: the clock of g1-b:20881 (slave of g1) differs from that of the other copy or of "
            "the metaserver: nothing is deleted",
        ),
    ),
    Situation(
        "the metaserver's clock is behind",
        pages={
            "g1-a": metrics(master=True, clocks_disagree=1, **ahead(metaserver=60, slave=0.1)),
            "g1-b": metrics(clocks_disagree=1, **ahead(metaserver=60, master=-0.1)),
        },
        verdict=(
            "FAIL clocks: the clock of the metaserver is 60 s behind those of g1-a:20881 (master of g1) and "
            "of the slave: nothing is deleted",
            "FAIL clocks: the clock of the metaserver is 60 s behind those of g1-b:20881 (slave of g1) and "
            "of the master: nothing is deleted",
        ),
    ),
    Situation(
        "mixed versions",
        pages={"g1-b": metrics(version="0.2.0")},
        verdict=("WARN versions: 0.2.0: broker g1-b:20881; 0.3.0: broker g1-a:20881",),
    ),
    Situation(
        "a broker shows no version",
        pages={"g1-b": ""},
        verdict=("WARN disks: g1-b:20881 (slave of g1) does not show its metrics: 403",),
        fine=("versions: the others run 0.3.0; unknown: broker g1-b:20881",),
    ),
    Situation(
        "slave rolled back",
        readonly("slave_down", slave=("rolled_back",)),
        verdict=("FAIL brokers: g1-b:20881 (SLAVE of g1) is no whole copy: rolled_back",),
    ),
    Situation(
        "the slave's flip awaits its repair",
        readonly("slave_down", slave=("corrupt",)),
        verdict=("FAIL brokers: g1-b:20881 (SLAVE of g1) is no whole copy: corrupt",),
    ),
    Situation("a repaired flip", pages={"g1-b": metrics(scrub_findings_total=1)}),
    Situation(
        "master damaged",
        readonly("corrupt"),
        verdict=("FAIL brokers: g1-a:20881 (MASTER of g1) rejects produces: corrupt",),
    ),
    Situation(
        "copies differ",
        readonly(slave=("diverged",), parted=PartedTail(400, (("s.a", 30, 31),))),
        verdict=(
            "FAIL brokers: g1-b:20881 (SLAVE of g1) is no whole copy: diverged. It alone has 2 messages, "
            "from offset 400 of its log on: they may have been acknowledged",
        ),
    ),
    Situation("marked readonly by an operator", marked),
    Situation("slave behind", slave_behind, verdict=("WARN copies: the slave of g1 lacks 1.0 GiB",)),
    Situation(
        "token ends",
        token_ends,
        verdict=("WARN tokens: 1 expire within two weeks, first that of ending (ID) in 2 days",),
    ),
    Situation(
        "a client is refused",
        client_refused,
        verdict=(
            "FAIL routes: new subjects or clients are refused: token 'shop' has 3 watches, the most that one "
            "token may have",
        ),
    ),
    Situation(
        "another metaserver refuses",
        client_refused_elsewhere,
        verdict=(
            "FAIL brokers: g1-b:20881 (SLAVE of g1) another process with its name is refused",
            "FAIL routes: new subjects or clients are refused: token 'shop' has 3 watches",
        ),
    ),
    Situation(
        "consumer group offline",
        pages={"g1-a": metrics(master=True, **{'group_cause{cause="offline",consumer_group="c",subject="s"}': 1})},
        verdict=("WARN consumer groups: g1-a:20881 (master of g1) delivers less to c of s: offline",),
    ),
    Situation(
        "log held by a consumer group",
        pages={"g1-a": metrics(master=True, held_bytes=GIB)},
        verdict=(
            "WARN retention: g1-a:20881 (master of g1) keeps 1.0 GiB past retention: a consumer group has "
            "not consumed it",
        ),
    ),
    Situation(
        "slave acts as master",
        pages={"g1-b": metrics(master=True)},
        verdict=("FAIL roles: g1-b:20881 (slave of g1) acts as the master, the metaserver has it as SLAVE",),
    ),
]


def series(metrics):
    """Samples as scraped: label of the check, or nothing, and value."""
    return {
        (metric.name, sample.labels.get("check", "")): sample.value
        for metric in metrics.read()
        for sample in metric.samples
    }


async def findings(metrics):
    """Return the gauges after the next look, without zeros."""
    task = asyncio.create_task(metrics.scrapes.run())
    name = "qmq_metaserver_doctor_findings"
    while (name, CheckKind.DATABASE) not in (found := series(metrics)):
        await asyncio.sleep(0)
    task.cancel()
    assert {check for at, check in found if at == name} == set(CheckKind)
    return {check: value for (at, check), value in found.items() if at == name and value}


def answer_of(done):
    return Answer(Exit.DONE if done.done else Exit.REFUSED, done.message, done.data, None)


async def lines(world, pages, monkeypatch):
    """Run Doctor; brokers have their hostname as address."""
    answers = {name: answer_of(await world.run(name)) for name in ("Doctor", "ListMetaservers", "ReplicaStatus")}
    brokers = await world.done("ListBrokers")
    answers["ListBrokers"] = Answer(Exit.DONE, "", [row | {"ip": row["hostname"]} for row in brokers], None)

    def read_page(address, path, token=""):
        text = pages.get(address.host, "")
        return doctor.Page(200 if text else 403, text, None)

    monkeypatch.setattr(doctor, "connect", lambda host, port: 0.0)
    monkeypatch.setattr(doctor, "read_page", read_page)
    return list(doctor._installation(answers.__getitem__, "token", False))


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
async def test_verdict_names_the_cause(cluster, monkeypatch, situation):
    cluster.liveness.peers.read([], now_ms=cluster.registry.now_ms())
    await situation.spoil(cluster)
    found = await lines(cluster, WELL | (situation.pages or {}), monkeypatch)
    wrong = [finding for finding in found if finding.level is not Level.OK]
    verdict = [f"{finding.level} {finding.step}: {finding.found}" for finding in wrong]
    assert tuple(re.sub(r"\([0-9a-f]{12}\)", "(ID)", line) for line in verdict) == situation.verdict
    fine = {f"{finding.step}: {finding.found}" for finding in found if finding.level is Level.OK}
    assert set(situation.fine) <= fine
    assert all(finding.do for finding in wrong)
    assert situation.remedy in " ".join(finding.do for finding in wrong)
    counts = Counter(check["kind"] for check in (await cluster.done("Doctor"))["checks"] if not check["ok"])
    if situation.spoil is client_refused_elsewhere:
        counts.clear()  # metrics call nobody
    assert await findings(DoctorMetrics(lambda: examine_reported(cluster.context))) == counts


async def test_healthy_installation_has_no_findings(cluster, http):
    await report_unplaced(cluster, "g1", "g1-c")  # a removed spare broker: its group lacks nothing
    http.actions.run = cluster.actions.run
    for role, status in ((None, 401), (TokenRole.CLIENT, 403), (TokenRole.VIEWER, 200), (TokenRole.ADMIN, 200)):
        answer = await http.client.get("/api/doctor", headers=http.headers(role))
        assert answer.status_code == status, role
    data = answer.json()["data"]
    assert data["healthy"] and all(check["ok"] for check in data["checks"])
    assert {check["kind"] for check in data["checks"]} <= set(CheckKind)
    assert await findings(DoctorMetrics(lambda: examine_reported(cluster.context))) == {}


async def test_broker_with_a_place_is_not_unplaced(cluster):
    """A fixed bug: Doctor named AddBroker for a minute after the broker had got a place, here or in another group."""
    await no_slave(cluster)
    await report_unplaced(cluster, "g1", "g1-b", "g1-c", "g1-d")
    await cluster.done("AddBroker", **place("g2", 0, "g1-c"))
    unplaced = cluster.registry.registration.unplaced
    assert [broker.hostname for broker, _ in unplaced()] == ["g1-d", "g1-b"]
    await cluster.done("AddBroker", **place("g1", 1, "g1-b"))
    assert [broker.hostname for broker, _ in unplaced()] == ["g1-d"]


async def test_disk_of_another_group_gets_no_place_behind_an_old_reading(world):
    """A fixed bug: the row got that disk, and an empty one, as the refusal asks for, was refused as another disk."""
    await (await world.another()).done("AddBroker", **place("g3", 0, "g3-a"))
    broker = Broker("g1", Role.SLAVE, "g3-a", "10.0.0.1", 20881, 20882, 20883, 20884, incarnation="disk of g1")
    with pytest.raises(OperatorError, match="belongs to g3, and its data directory to g1"):
        await world.registry.registration.register(broker, lambda question: asyncio.sleep(0), term=1)
    assert world.registry.directory.groups["g3"].master.incarnation == ""


async def test_restarted_metaserver_is_not_missing(world):
    await other_stops(world)
    back = replace(OTHER, id="m3")
    world.liveness.peers.read([back], now_ms=world.registry.now_ms())
    [check] = [check for check in (await world.done("Doctor"))["checks"] if check["kind"] == CheckKind.METASERVERS]
    assert check["ok"] and check["found"] == "2 up", "this one counts itself"


async def test_metrics_query_no_broker(cluster):
    cluster.brokers.silent.add("g1")  # a call would find it
    assert all(check["ok"] for check in await examine_reported(cluster.context))
    assert not (await cluster.done("Doctor"))["healthy"]


async def test_scrape_triggers_checks_and_does_not_wait():
    examined, may_end = [], asyncio.Event()

    async def examine():
        examined.append(None)
        await may_end.wait()
        return [
            {"kind": CheckKind.BROKER, "ok": False},
            {"kind": CheckKind.BROKER, "ok": False},
            {"kind": CheckKind.GROUP, "ok": True},
        ]

    metrics = DoctorMetrics(examine)
    task = asyncio.create_task(metrics.scrapes.run())
    await asyncio.sleep(0)
    assert not examined
    for _ in range(3):
        assert series(metrics) == {("qmq_metaserver_doctor_checked_timestamp_seconds", ""): 0}
        await asyncio.sleep(0)
    assert len(examined) == 1
    may_end.set()
    while len(found := series(metrics)) == 1:
        await asyncio.sleep(0)
    assert found["qmq_metaserver_doctor_findings", CheckKind.BROKER] == 2
    assert found["qmq_metaserver_doctor_findings", CheckKind.GROUP] == 0
    assert found["qmq_metaserver_doctor_checked_timestamp_seconds", ""] > 0 and len(examined) == 1
    task.cancel()


async def test_failing_check_leaves_the_timestamp_unchanged(caplog):
    async def examine():
        raise ValueError("a defect")

    metrics = DoctorMetrics(examine)
    task = asyncio.create_task(metrics.scrapes.run())
    series(metrics)
    while "a defect" not in caplog.text:
        await asyncio.sleep(0)
    assert not task.done() and series(metrics) == {("qmq_metaserver_doctor_checked_timestamp_seconds", ""): 0}
    task.cancel()
