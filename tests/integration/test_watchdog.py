"""Shell. Watchdog processes send the rows that stay in an outbox, also when the leader ends."""

from __future__ import annotations

import signal
import time

from qmq.settings import SECRET
from tests.integration.cluster_world import WAIT_S, running, until
from tests.integration.tools_world import DONE
from tests.integration.watchdog_world import Application, WatchdogProcess, register

SUBJECT = "order.paid"


def test_leftover_rows_are_sent_once_and_deleted(tmp_path, application):
    with running(tmp_path / "cluster") as cluster, WatchdogProcess(cluster, tmp_path) as watchdog:
        application.write(SUBJECT, [f"m-{number}" for number in range(2_500)])
        application.write(SUBJECT, ["tagged"], tags=("paid",))
        application.write_rows(["no JSON at all"])
        _register_as_documented(cluster, application.source, tmp_path / "password")
        until(lambda: application.count() == 0, "all rows are sent or parked")
        got = cluster.consume_all(SUBJECT, "g", 2_501)
        assert sorted(id for _, id in got) == sorted([*(f"m-{number}" for number in range(2_500)), "tagged"])
        [parked] = application.rows()
        assert parked.status == -2 and "no JSON" in parked.reason and parked.claim is None
        [shown] = watchdog.ask("/outbox/stuck")["databases"]
        assert shown["parked"] == 1 and shown["rows"][0]["reason"] == parked.reason
        url = application.source.url
        until(lambda: watchdog.metrics().get(f'qmq_watchdog_rows{{database="{url}",state="parked"}}') == 1, "counted")
        assert watchdog.metrics()[f'qmq_watchdog_sent_total{{database="{url}"}}'] == 2_501
        assert "no JSON" not in watchdog.log.read_text()
        settings = watchdog.ask("/settings")
        assert settings["token"] == SECRET and cluster.token not in str(settings)
        [shown] = [row for row in cluster.manage("Settings")["processes"] if row["kind"] == "watchdog"]
        assert shown["settings"] == settings


def _register_as_documented(cluster, source, password):
    """Run the command of docs/watchdog.md. A file has no server, user or password."""
    host, port, database = source.place
    words = {"type": source.kind, "database": database, "age": 0}
    if source.kind != "sqlite":
        password.write_text(source.password or "none")
        password.chmod(0o600)
        words |= {"host": host, "port": port, "username": source.user, "password_file": password}
    ended = cluster.tool("AddDb", "--yes", **words)
    assert ended.returncode == DONE, ended.stderr


def test_killed_leader_is_replaced_within_ten_seconds(tmp_path, application):
    usual = {"lease_ms": 5000, "beat_ms": 1000}
    with running(tmp_path / "cluster") as cluster:
        register(cluster, application.source)
        with (
            WatchdogProcess(cluster, tmp_path, "w1", **usual) as first,
            WatchdogProcess(cluster, tmp_path, "w2", **usual) as second,
        ):
            until(lambda: first.is_leader or second.is_leader, "one watchdog leads")
            leader, standby = (first, second) if first.is_leader else (second, first)
            assert not standby.is_leader and leader.health()["node"] != standby.health()["node"]
            application.write(SUBJECT, [f"a-{number}" for number in range(3_000)])
            leader.pause(application)
            began = time.monotonic()
            until(lambda: standby.is_leader, "the standby leads")
            took_s = [time.monotonic() - began]
            until(lambda: application.count() == 0, "the claimed rows of the paused leader are sent")
            application.write(SUBJECT, [f"b-{number}" for number in range(100)])
            leader.process.send_signal(signal.SIGCONT)
            until(lambda: leader.health() is not None, "the first one continues")
            until(lambda: application.count() == 0, "all is sent")
            until(lambda: not leader.is_leader, "the first one steps down")
            assert standby.is_leader
            standby.process.kill()
            began = time.monotonic()
            until(lambda: leader.is_leader, "the first one leads again")
            took_s.append(time.monotonic() - began)
            assert min(took_s) < 10, "a pause of the machine may delay one of the two"
            application.write(SUBJECT, ["c"])
            until(lambda: application.count() == 0, "the leader sends")
        got = cluster.consume_all(SUBJECT, "g", 3_101)
        assert len({id for _, id in got}) == len(got) == 3_101


def test_a_stopped_leader_gives_its_lease_back(tmp_path):
    with running(tmp_path / "cluster") as cluster:
        slow = {"lease_ms": 60_000, "beat_ms": 200}
        with WatchdogProcess(cluster, tmp_path, "w1", **slow) as first:
            until(lambda: first.is_leader, "the first one leads")
            with WatchdogProcess(cluster, tmp_path, "w2", **slow) as second:
                first.process.terminate()
                assert first.process.wait(WAIT_S) == 0
                until(lambda: second.is_leader, "the second one leads before the lease would end")
                [shown] = cluster.manage("ListWatchdogs")
                assert (shown["room"], shown["term"]) == ("default", 2)
                assert shown["address"] == f"127.0.0.1:{second.port}"


def test_databases_are_added_and_removed_at_runtime(tmp_path, application):
    other = Application(f"sqlite:///{tmp_path}/other.db", table="outgoing")
    with running(tmp_path / "cluster") as cluster, WatchdogProcess(cluster, tmp_path) as watchdog:
        cluster.manage("AddDb", type="postgresql", host="127.0.0.1", port=1, username="u", password="p", database="d")
        words = register(cluster, application.source)
        application.write(SUBJECT, ["first"])
        until(lambda: application.count() == 0, "the reachable database is drained")
        register(cluster, other.source)
        other.write(SUBJECT, ["second"])
        until(lambda: other.count() == 0, "the added database is drained")
        troubles = until(lambda: watchdog.health()["troubles"], "the dead database is reported")
        assert any("127.0.0.1:1/d" in url for url in troubles)
        cluster.manage(
            "RemoveDb", type=words["type"], host=words["host"], port=words["port"], database=words["database"]
        )
        until(
            lambda: application.source.url not in str(watchdog.ask("/outbox/stuck")),
            "the removed database is not scanned",
        )
        application.write(SUBJECT, ["left alone"])
        other.write(SUBJECT, ["third"])
        until(lambda: other.count() == 0, "the other database is drained")
        assert application.count() == 1
        assert sorted(id for _, id in cluster.consume_all(SUBJECT, "g", 3)) == ["first", "second", "third"]
    other.close()
