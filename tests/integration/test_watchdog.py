"""Shell. Real watchdogs, brokers and databases: what stays in an outbox is sent, whoever dies meanwhile."""

from __future__ import annotations

import signal
import time

import pytest

from tests.integration.cluster_world import WAIT_S, begin, consume_all, end, running, until
from tests.integration.tools_world import DONE, run
from tests.integration.watchdog_world import Application, WatchdogProcess, register

SUBJECT = "order.paid"


@pytest.fixture
def application(database_url):
    made = Application(database_url)
    yield made
    made.close()


def test_leftover_rows_are_sent_once_and_deleted(tmp_path, application):
    with running(tmp_path / "cluster") as cluster, WatchdogProcess(cluster, tmp_path) as watchdog:
        application.write(SUBJECT, [f"m-{number}" for number in range(2_500)])
        application.write(SUBJECT, ["tagged"], tags=("paid",))
        application.write_rows(["no JSON at all"])
        _register_as_documented(cluster, application.source, tmp_path / "password")
        until(lambda: application.count() == 0, "all rows are sent or parked")
        got = consume_all(cluster, SUBJECT, "g", 2_501)
        assert sorted(id for _, id in got) == sorted([*(f"m-{number}" for number in range(2_500)), "tagged"])
        [parked] = application.rows()
        assert parked.status == -2 and "no JSON" in parked.reason and parked.claim is None
        [shown] = watchdog.ask("/outbox/stuck")["databases"]
        assert shown["parked"] == 1 and shown["rows"][0]["reason"] == parked.reason
        url = application.source.url
        until(lambda: watchdog.metrics().get(f'qmq_watchdog_rows{{database="{url}",state="parked"}}') == 1, "counted")
        assert watchdog.metrics()[f'qmq_watchdog_sent_total{{database="{url}"}}'] == 2_501
        assert "no JSON" not in watchdog.log.read_text()


def _register_as_documented(cluster, source, password):
    """Type the command of docs/watchdog.md. A file has no server, no user and no password, and none is asked for."""
    host, port, database = source.place
    words = {"type": source.kind, "database": database, "age": 0}
    if source.kind != "sqlite":
        password.write_text(source.password or "none")
        password.chmod(0o600)
        words |= {"host": host, "port": port, "username": source.user, "password_file": password}
    ended = run("AddDb", cluster.metaserver, "--yes", token=cluster.token, **words)
    assert ended.returncode == DONE, ended.stderr


def test_killed_leader_is_replaced_within_ten_seconds(tmp_path, application):
    usual = {"lease_ms": 5000, "beat_ms": 1000}
    with running(tmp_path / "cluster") as cluster:
        register(cluster, application.source)
        with (
            WatchdogProcess(cluster, tmp_path, "w1", **usual) as first,
            WatchdogProcess(cluster, tmp_path, "w2", **usual) as second,
        ):
            until(lambda: first.is_leader or second.is_leader, "one of them leads")
            leader, standby = (first, second) if first.is_leader else (second, first)
            assert not standby.is_leader and leader.health()["node"] != standby.health()["node"]
            application.write(SUBJECT, [f"a-{number}" for number in range(3_000)])
            leader.pause(application)
            began = time.monotonic()
            until(lambda: standby.is_leader, "the other one leads")
            took_s = [time.monotonic() - began]
            until(lambda: application.count() == 0, "what the paused one had claimed is sent")
            application.write(SUBJECT, [f"b-{number}" for number in range(100)])
            leader.process.send_signal(signal.SIGCONT)
            until(lambda: leader.health() is not None, "it goes on")
            until(lambda: application.count() == 0, "all is sent")
            until(lambda: not leader.is_leader, "it knows that it was followed")
            assert standby.is_leader
            standby.process.kill()
            began = time.monotonic()
            until(lambda: leader.is_leader, "the first one leads again")
            took_s.append(time.monotonic() - began)
            assert min(took_s) < 10, "at the latest when the machine does not stand still, too"
            application.write(SUBJECT, ["c"])
            until(lambda: application.count() == 0, "it sends again")
        got = consume_all(cluster, SUBJECT, "g", 3_101)
        assert len({id for _, id in got}) == len(got) == 3_101


def test_a_stopped_leader_gives_its_lease_back(tmp_path):
    with running(tmp_path / "cluster") as cluster:
        slow = {"lease_ms": 60_000, "beat_ms": 200}
        with WatchdogProcess(cluster, tmp_path, "w1", **slow) as first:
            until(lambda: first.is_leader, "it leads")
            with WatchdogProcess(cluster, tmp_path, "w2", **slow) as second:
                first.process.terminate()
                assert first.process.wait(WAIT_S) == 0
                until(lambda: second.is_leader, "the other one does not wait for the lease to end")
                [shown] = cluster.manage("ListWatchdogs")
                assert (shown["room"], shown["term"]) == ("default", 2)
                assert shown["address"] == f"127.0.0.1:{second.port}"


def test_databases_are_added_and_removed_at_runtime(tmp_path, application):
    other = Application(f"sqlite:///{tmp_path}/other.db", table="outgoing")
    with running(tmp_path / "cluster") as cluster, WatchdogProcess(cluster, tmp_path) as watchdog:
        cluster.manage("AddDb", type="postgresql", host="127.0.0.1", port=1, username="u", password="p", database="d")
        words = register(cluster, application.source)
        application.write(SUBJECT, ["first"])
        until(lambda: application.count() == 0, "the database that is well is drained")
        register(cluster, other.source)
        other.write(SUBJECT, ["second"])
        until(lambda: other.count() == 0, "a new one, too, under another table's name")
        troubles = until(lambda: watchdog.health()["troubles"], "the dead one is told")
        assert any("127.0.0.1:1/d" in url for url in troubles)
        cluster.manage(
            "RemoveDb", type=words["type"], host=words["host"], port=words["port"], database=words["database"]
        )
        until(lambda: application.source.url not in str(watchdog.ask("/outbox/stuck")), "it is not scanned any more")
        application.write(SUBJECT, ["left alone"])
        other.write(SUBJECT, ["third"])
        until(lambda: other.count() == 0, "the other one is")
        assert application.count() == 1
        assert sorted(id for _, id in consume_all(cluster, SUBJECT, "g", 3)) == ["first", "second", "third"]
    other.close()


def test_rows_wait_for_a_writable_broker(tmp_path, application):
    with running(tmp_path / "cluster") as cluster, WatchdogProcess(cluster, tmp_path):
        register(cluster, application.source)
        application.write(SUBJECT, ["before"])
        until(lambda: application.count() == 0, "it works")
        slave = cluster.broker("g1", "slave").hostname
        end(cluster, slave)
        application.write(SUBJECT, [f"m-{number}" for number in range(50)])
        touched = "status = 0 AND (reason IS NOT NULL OR claim IS NOT NULL)"
        until(lambda: application.count(touched) == 50, "it has tried, and says of each row why not or where it is")
        begin(cluster, slave)
        until(lambda: application.count() == 0, "the group takes them again")
        got = consume_all(cluster, SUBJECT, "g", 51)
        assert len({id for _, id in got}) == 51


def test_parked_row_is_sent_after_a_retry(tmp_path, application):
    with running(tmp_path / "cluster") as cluster:
        with WatchdogProcess(cluster, tmp_path) as watchdog:
            register(cluster, application.source)
            application.write(SUBJECT, ["sent"])
            until(lambda: application.count() == 0, "it is sent")
        application.write(SUBJECT, ["sent", "not sent"])
        with application.engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE {application.table} SET status = -2, reason = 'by hand'")
        with WatchdogProcess(cluster, tmp_path, "w2") as watchdog:
            until(lambda: watchdog.health()["databases"], "it knows the database")
            [report] = watchdog.ask("/outbox/reconcile?older=0")["databases"]
            assert report["counts"] == {"inLog": 1, "notInLog": 1, "unchecked": 0}
            assert {row["messageId"]: row["log"] for row in report["rows"]} == {"sent": "inLog", "not sent": "notInLog"}
            wrong = next(row.id for row in application.rows() if '"sent"' in row.content)
            right = next(row.id for row in application.rows() if '"not sent"' in row.content)
            done = watchdog.ask(f"/outbox/retry?database={application.source.url}&ids={right}", method="POST")
            assert done["databases"][0]["retried"] == 1
            until(lambda: [row.id for row in application.rows()] == [wrong], "the one that was named is sent")
        assert sorted(id for _, id in consume_all(cluster, SUBJECT, "g", 2)) == ["not sent", "sent"]
