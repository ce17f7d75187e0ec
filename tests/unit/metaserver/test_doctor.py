"""Shell. Doctor's checks: as an action, as JSON at `/api/doctor`, as metrics."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

from qmq.errors import OperatorError
from qmq.metaserver.actions.causes import CheckKind
from qmq.metaserver.actions.doctor import examine_reported
from qmq.metaserver.model import Broker, MetaserverRow, PartedTail
from qmq.metaserver.observability.collectors import DoctorMetrics
from qmq.metaserver.storage.database import DatabaseAway
from qmq.rights import TokenRole
from qmq.types import Role
from tests.unit.metaserver.http_world import HttpWorld


def never_registered(world):
    return world.copies("g2")


async def killed(world):
    world.stop("g1-b")
    world.beat("g1-a", writable=False, readonly_reasons=("slave_down",))


async def machine_lost(world):
    world.stop("g1-a")
    world.stop("g1-b")


async def no_whole_copy(world):
    world.beat("g1-b", role=1, readonly_reasons=("rolled_back",))


async def disk_full(world):
    world.beat("g1-a", writable=False, readonly_reasons=("disk",))


async def no_slave(world):
    world.stop("g1-b")
    await world.done("RemoveBroker", hostname="g1-b", servePort=20881, force="true")


async def report_unplaced(world, group, *hostnames):
    """Brokers with the log of a group register without a place in its row."""
    for term, hostname in enumerate(hostnames, 1):
        ports = 20881, 20882, 20883, 20884
        broker = Broker(group, Role.SLAVE, hostname, "10.0.0.1", *ports, incarnation=f"disk of {hostname}")
        with pytest.raises(OperatorError, match=f"AddBroker .*--hostname={hostname}"):
            await world.registry.registration.register(broker, lambda question: asyncio.sleep(0), term=term)


async def slave_without_a_place(world):
    await no_slave(world)
    await report_unplaced(world, "g1", "g1-b")


async def group_without_a_row(world):
    await report_unplaced(world, "g7", "g7-a", "g7-b")


async def removed_spare_broker(world):
    """Its group lacks nothing."""
    await report_unplaced(world, "g1", "g1-c")


async def token_ends(world):
    await world.done("AddToken", name="ending", role="client", days=3)


async def refused(world):
    world.refusals["shop"] = "token 'shop' has 3 watches, the most that one token may have"


async def database_away(world):
    async def away(*_, **__):
        raise DatabaseAway("killed")

    world.registry.mirror.catch_up = world.database.read = away


async def metaserver_silent(world):
    gone = MetaserverRow("m2", "10.0.0.2:8080", "10.0.0.2:8081", beat=1, version="1")
    await world.database.write(lambda repository: repository.beat(gone))
    for ago_ms in (8000, 6000, 4000, 2000, 0):
        world.liveness.peers.read([gone], now_ms=world.registry.now_ms() - ago_ms)


async def metaserver_stopped(world):
    """A stopped metaserver removes its row."""
    gone = MetaserverRow("m2", "10.0.0.2:8080", "10.0.0.2:8081", beat=1, version="1")
    for rows in ([gone], []):
        world.liveness.peers.read(rows, now_ms=world.registry.now_ms())


CAUSES = {
    never_registered: ({CheckKind.MACHINE: 0, CheckKind.BROKER: 2}, "never registered"),
    killed: ({CheckKind.BROKER: 1}, "did not answer at"),
    machine_lost: ({CheckKind.MACHINE: 1}, "g1-a:20881 (MASTER of g1)"),
    no_whole_copy: ({CheckKind.BROKER: 1}, "start the other copy, which refills it"),
    disk_full: ({CheckKind.BROKER: 1}, "disk"),
    no_slave: ({CheckKind.GROUP: 1}, "AddBroker"),
    slave_without_a_place: (
        {CheckKind.GROUP: 1},
        "has no slave, but g1-b:20881 has its log and no place empty none of them, and return them to their places: "
        "qmq AddBroker --brokerGroup=g1 --role=1 --hostname=g1-b",
    ),
    group_without_a_row: (
        {CheckKind.GROUP: 1},
        "qmq AddBroker --brokerGroup=g7 --role=0 --hostname=g7-b --ip=10.0.0.1 --servePort=20881 --syncPort=20882, "
        "then qmq AddBroker --brokerGroup=g7 --role=1 --hostname=g7-a",
    ),
    token_ends: ({CheckKind.TOKENS: 1}, "ending"),
    refused: ({CheckKind.ROUTES: 1}, "token 'shop' has 3 watches"),
    database_away: ({CheckKind.DATABASE: 1}, "killed"),
    metaserver_silent: ({CheckKind.METASERVERS: 1}, "silent: 10.0.0.2:8080"),
    metaserver_stopped: ({CheckKind.METASERVERS: 1}, "stopped: 10.0.0.2:8080"),
}
"""Faults of an installation with one group: the number of findings by check, and words of one of them."""


_http = cache(HttpWorld)
"""Made once: it takes longer than a test."""


def http_of(world):
    """The HTTP side over these real actions."""
    http = _http()
    http.actions.run = world.actions.run
    return http


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


@pytest.mark.parametrize("spoil", CAUSES, ids=lambda spoil: spoil.__name__)
async def test_each_cause_is_one_finding_everywhere(world, spoil):
    await world.running_copies("g1")
    await spoil(world)
    http = http_of(world)
    answer = await http.client.get("/api/doctor", headers=http.headers(TokenRole.VIEWER))
    data = answer.json()["data"]
    wrong = [check for check in data["checks"] if not check["ok"]]
    kinds, words = CAUSES[spoil]
    expected = {kind: number for kind, number in kinds.items() if number}
    assert {kind: [check["kind"] for check in wrong].count(kind) for kind in expected} == expected
    assert len(wrong) == sum(expected.values()) and not data["healthy"]
    assert all(check["remedy"] and check["found"] for check in wrong)
    assert any(words in f"{check['name']} {check['found']} {check['remedy']}" for check in wrong), wrong
    assert await findings(DoctorMetrics(lambda: examine_reported(world.desk))) == expected


async def test_healthy_installation_has_no_findings(world):
    await world.running_copies("g1")
    await removed_spare_broker(world)
    http = http_of(world)
    for role, status in ((None, 401), (TokenRole.CLIENT, 403), (TokenRole.VIEWER, 200), (TokenRole.ADMIN, 200)):
        answer = await http.client.get("/api/doctor", headers=http.headers(role))
        assert answer.status_code == status, role
    data = answer.json()["data"]
    assert data["healthy"] and all(check["ok"] for check in data["checks"])
    assert {check["kind"] for check in data["checks"]} <= set(CheckKind)
    assert await findings(DoctorMetrics(lambda: examine_reported(world.desk))) == {}
    world.beat("g1-a", writable=False, readonly_reasons=("operator",))
    checks = (await world.done("Doctor"))["checks"]
    assert all(check["ok"] for check in checks if check["kind"] == CheckKind.BROKER), "a mark is no fault"


async def test_restarted_metaserver_is_not_missing(world):
    await metaserver_stopped(world)
    checks = (await world.done("Doctor"))["checks"]
    assert [check["found"] for check in checks if not check["ok"]] == ["stopped: 10.0.0.2:8080"]
    back = MetaserverRow("m3", "10.0.0.2:8080", "10.0.0.2:8081", beat=1, version="1")
    world.liveness.peers.read([back], now_ms=world.registry.now_ms())
    [check] = [check for check in (await world.done("Doctor"))["checks"] if check["kind"] == CheckKind.METASERVERS]
    assert check["ok"] and check["found"] == "2 up", "this one counts itself"
    unread_ms = world.registry.now_ms() - 60_000
    world.liveness.peers.read([back], now_ms=unread_ms)
    [check] = [check for check in (await world.done("Doctor"))["checks"] if check["kind"] == CheckKind.METASERVERS]
    assert check["found"] == "this one answers; without the database the others are unknown"


async def test_metrics_query_no_broker(world):
    await world.running_copies("g1")
    world.brokers.silent.add("g1")  # a call would find it
    assert all(check["ok"] for check in await examine_reported(world.desk))
    assert not (await world.done("Doctor"))["healthy"]


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


async def test_doctor_counts_messages_that_only_a_diverged_copy_has(world):
    await world.running_copies("g1")
    tail = PartedTail(400, (("s.a", 30, 31), ("s.b", 7, 7)))
    world.beat("g1-b", role=1, readonly_reasons=("diverged",), parted=tail)
    [wrong] = [check for check in (await world.done("Doctor"))["checks"] if not check["ok"]]
    assert "It alone has 3 messages, from offset 400 of its log on" in wrong["found"]
    assert wrong["facts"]["parted"]["subjects"] == {"s.a": [30, 31], "s.b": [7, 7]}
