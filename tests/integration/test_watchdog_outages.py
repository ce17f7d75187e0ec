"""Shell. Watchdog without databases, brokers or metaservers: all rows are sent later, each once."""

from __future__ import annotations

import pytest

from tests.integration.cluster_world import running, until
from tests.integration.watchdog_world import Application, WatchdogProcess, register

SUBJECT = "order.paid"


def names(count, name="m"):
    return [f"{name}-{number}" for number in range(count)]


@pytest.fixture
def application(database_server):
    made = Application(database_server.create_database())
    yield made
    made.close()
    database_server.drop_database(str(made.engine.url))


def test_lost_databases_are_drained_once_back(tmp_path, application, database_server):
    other = Application(f"sqlite:///{tmp_path}/other.db")
    with running(tmp_path / "cluster") as cluster, WatchdogProcess(cluster, tmp_path, page_rows=50) as watchdog:
        application.write(SUBJECT, names(3_000))
        register(cluster, other.source)
        register(cluster, application.source)
        until(lambda: application.count() < 3_000, "the first rows are sent")
        database_server.kill()
        until(lambda: application.source.url in watchdog.health()["troubles"], "the lost database is reported")
        other.write(SUBJECT, ["beside the dead one"])
        until(lambda: other.count() == 0, "the other database is drained")
        database_server.start()
        application.engine.dispose()  # connections of the test are dead, too
        with database_server.paused():
            other.write(SUBJECT, ["beside the one that hangs"])
            until(lambda: other.count() == 0, "the other database is drained, again")
        until(lambda: application.count() == 0, "the returned database is drained", timeout_s=60)
        got = [id for _, id in cluster.consume_all(SUBJECT, "g", 3_002)]
        assert len(got) == len(set(got)) == 3_002
    other.close()


def test_killed_masters_and_metaservers_cause_no_duplicates(tmp_path):
    application = Application(f"sqlite:///{tmp_path}/shop.db")
    with running(tmp_path / "cluster", groups=("g1", "g2")) as cluster:
        with WatchdogProcess(cluster, tmp_path, page_rows=50) as watchdog:
            register(cluster, application.source)
            application.write(SUBJECT, names(5_000))
            until(lambda: application.count() < 5_000, "the first rows are sent")
            for group in ("g1", "g2", "g1"):
                master = cluster.broker(group, "master").hostname
                cluster.end(master)
                cluster.begin(master)
            cluster.end("metaserver")
            application.write(SUBJECT, names(100, "late"))
            until(lambda: not watchdog.is_leader, "without a metaserver the leader steps down")
            assert watchdog.health()["metaserver"]
            cluster.begin("metaserver")
            until(lambda: watchdog.is_leader, "it leads again")
            until(lambda: application.count() == 0, "all is sent", timeout_s=60)
        got = [id for _, id in cluster.consume_all(SUBJECT, "g", 5_100)]
        assert len(got) == len(set(got)) == 5_100
    application.close()
