"""Shell. Outages of the database: known routes and roles continue, changes wait."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import httpx
import pytest

from qmq.deploy.control import manage
from qmq.errors import QmqError
from qmq.memory import PAGE_BYTES
from tests.integration.cluster_world import WAIT_S, until
from tests.integration.installation_world import (
    HEADERS,
    STEADY_S,
    SUBJECT,
    TOKEN,
    Installation,
    Observers,
    end,
    ended,
    installation,
)
from tests.support.promises import Tries

METADATA = [("x-api-token", TOKEN)]
ATTEMPTS = 100


@pytest.fixture(scope="module")
def world(mariadb, tmp_path_factory):
    with installation(tmp_path_factory.mktemp("down"), mariadb.create_database()) as running:
        with Observers(running) as observers:
            until(lambda: observers.sent > 5, "the subject has a route")
        yield running


def database_is_up(url):
    return httpx.get(f"{url}/health/ready", trust_env=False, timeout=20).json()["database"]


def all_know(world, *, up):
    world.wait_all(lambda url: database_is_up(url) is up, f"it knows that the database is up: {up}")


def routes(url, *subjects):
    """Return routes over HTTP, as a client without gRPC requests them."""
    words = [("subject", subject) for subject in subjects]
    words += [("app", "test"), ("clientId", "test"), ("produces", "true")]
    answer = httpx.get(f"{url}/meta/routes", params=words, headers=HEADERS, trust_env=False, timeout=20)
    return {route["subject"]: route for route in answer.json()["routes"]}


def offers(url, subject):
    route = routes(url, subject).get(subject, {})
    return bool(route.get("groups")) and all(group["writable"] for group in route["groups"])


@contextlib.contextmanager
def stopped(server):
    server.stop()
    try:
        yield
    finally:
        server.start()


@pytest.mark.parametrize("away", [stopped, lambda server: server.paused()], ids=["stopped", "hangs"])
def test_weakness_15_16_17_metaserver_works_without_the_database(world, mariadb, away):
    """Weakness 15: a stalled database stalls unrelated clients. Weakness 16: the slave's address dies with the first
    database error. Weakness 17: subjects with too few groups depend on the database at each poll.
    """
    manage(world.url, TOKEN, "MarkReadonlyBrokerGroup", brokerGroup="g1", subject=SUBJECT)
    world.wait_all(lambda url: not offers(url, SUBJECT), "the mark is known")
    manage(world.url, TOKEN, "UnMarkReadonlyBrokerGroup", brokerGroup="g1", subject=SUBJECT)
    world.wait_all(lambda url: offers(url, SUBJECT), "it is known that the mark is gone")
    for _ in (sending := Tries(2.0, "each message is stored")):
        with Observers(world) as observers:
            until(lambda: observers.sent > 20, "the observers are at work")
            with away(mariadb):
                all_know(world, up=False)
                sent = observers.sent
                for service in world.metaservers:
                    for _ in (asking := Tries(0.5, f"a known route of {service.name}", most=10)):
                        began = time.monotonic()
                        assert offers(service.url, SUBJECT)
                        asking.took(time.monotonic() - began)
                time.sleep(STEADY_S)
            all_know(world, up=True)
        assert observers.problems == [] and observers.sent > sent
        sending.took(observers.slowest_s)


def test_attempts_to_reach_the_database_leave_no_memory_behind(world, mariadb):
    """Each attempt costs MariaDB's driver a TLS context of 0.8 MB, which the traceback of its error holds."""
    service = world.metaservers[0]
    world.look(service.url, "Doctor")  # allocates shared memory
    with stopped(mariadb):
        all_know(world, up=False)
        before = resident_bytes(service.pid)
        for _ in range(ATTEMPTS):
            world.look(service.url)
        assert resident_bytes(service.pid) - before < ATTEMPTS * 300_000
    all_know(world, up=True)


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def test_outage_stops_new_subjects_and_changes_only(world, mariadb):
    url = world.metaservers[0].url
    with stopped(mariadb):
        all_know(world, up=False)
        answer = routes(url, "new.subject", SUBJECT)
        refused = answer["new.subject"]["refused"]
        assert (
            answer[SUBJECT]["groups"] and "database does not answer" in refused and "known routes continue" in refused
        )
        for service in world.metaservers:
            with pytest.raises(QmqError, match="database does not answer"):
                manage(service.url, TOKEN, "MarkReadonlyBrokerGroup", brokerGroup="g1")
        assert world.writable(world.url)
    until(lambda: routes(url, "new.subject")["new.subject"].get("groups"), "it has a route")
    all_know(world, up=True)
    assert [group["readonlySubjects"] for group in world.look(world.url)] == [[]]


def test_broker_lost_during_the_outage_stays_down(world, mariadb):
    with stopped(mariadb):
        all_know(world, up=False)
        end(world.brokers[1], signal.SIGKILL)
        world.wait_all(lambda url: not world.up(url)["b1"], "knows")
    all_know(world, up=True)
    for service in world.metaservers:
        assert not world.up(service.url)["b1"]
    world.brokers[1].start()
    world.wait_writable()


def test_broker_restarts_while_the_database_is_away(world, mariadb):
    with stopped(mariadb):
        all_know(world, up=False)
        end(world.brokers[0], signal.SIGTERM)
        world.brokers[0].start()
        until(lambda: any(world.writable(service.url) for service in world.metaservers), "g1 accepts produces again")
        until(lambda: all(world.writable(service.url) for service in world.metaservers), "both know")
    all_know(world, up=True)
    assert world.writable(world.url)


def is_snapshot_of_all_so_far(world):
    """Make a change, and wait until the first metaserver has written a snapshot that contains it."""
    snapshot = world.folder / "m0.snapshot"
    for action in ("MarkReadonlyBrokerGroup", "UnMarkReadonlyBrokerGroup"):
        before = snapshot.stat().st_mtime_ns if snapshot.exists() else 0
        manage(world.metaservers[0].url, TOKEN, action, brokerGroup="g1", subject=SUBJECT)
        until(
            lambda before=before: snapshot.exists() and snapshot.stat().st_mtime_ns > before,
            f"there is a new snapshot after {action}",
        )
    world.wait_all(lambda url: offers(url, SUBJECT), "it is known that the mark is gone")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_weakness_23_metaserver_starts_from_its_snapshot(world, mariadb, how):
    """Weakness 23: no start without the database."""
    service = world.metaservers[0]
    is_snapshot_of_all_so_far(world)
    with Observers(world) as observers:
        until(lambda: observers.sent > 20, "the observers are at work")
        with stopped(mariadb):
            all_know(world, up=False)
            end(service, how)
            service.start()
            until(lambda: world.answers(service.url), "it serves")
            assert offers(service.url, SUBJECT) and world.writable(service.url)
            assert not database_is_up(service.url)
            time.sleep(STEADY_S)
        all_know(world, up=True)
        assert offers(service.url, SUBJECT)
    assert observers.problems == []


def test_metaserver_ends_in_order_while_the_database_stands_still(world, mariadb):
    service = world.metaservers[1]
    with mariadb.paused():
        all_know(world, up=False)
        service.signal(signal.SIGTERM)
        assert ended(service, WAIT_S) and service.exit_status == 0
    service.start()
    until(lambda: world.answers(service.url), "it is back")


def test_weakness_23_metaserver_without_database_and_snapshot_exits(tmp_path, mariadb):
    """Weakness 23: a metaserver that cannot serve ends with a stack trace."""
    url = mariadb.create_database()
    (service,) = Installation(tmp_path, url, metaservers=1).metaservers
    with stopped(mariadb):
        service.start()
        until(lambda: service.exit_status is not None, "it ends")
    assert service.exit_status == 1
    text = (tmp_path / "m0.log").read_text()
    assert "the database does not answer" in text and "no snapshot" in text and "Traceback" not in text


def test_destroyed_sqlite_file_is_served_from_memory(tmp_path):
    """The files beside it are destroyed, too, while the process has them open."""
    file = tmp_path / "m.db"
    with installation(tmp_path, f"sqlite:///{file}", metaservers=1) as world:
        with Observers(world) as observers:
            until(lambda: observers.sent > 20, "the observers are at work")
            whole = {path: path.read_bytes() for path in tmp_path.glob("m.db*")}
            for path in whole:
                path.write_bytes(b"this is no database" * 1000)
            all_know(world, up=False)
            time.sleep(STEADY_S)
            assert offers(world.metaservers[0].url, SUBJECT)
        assert observers.problems == []
