"""Shell. tools.sh OutboxStuck, OutboxRetry and OutboxReconcile, against a real watchdog."""

from __future__ import annotations

import json

from tests.integration.cluster_world import consume_all, running, until
from tests.integration.tools_world import DONE, REFUSED, UNREACHABLE, run
from tests.integration.watchdog_world import Application, WatchdogProcess, register

SUBJECT = "order.paid"


def test_operators_find_and_resend_stuck_rows(tmp_path):
    application = Application(f"sqlite:///{tmp_path}/shop.db")
    with running(tmp_path / "cluster") as cluster:

        def tool(command, *words, token=None, **options):
            return run(command, cluster.metaserver, *words, token=token or cluster.token, **options)

        nobody = tool("OutboxStuck")
        assert nobody.returncode == UNREACHABLE and "no watchdog of the room 'default' is active" in nobody.stderr
        with WatchdogProcess(cluster, tmp_path) as watchdog:
            until(lambda: watchdog.is_leader, "it leads")
            assert "no database is registered" in tool("OutboxStuck").stdout
            application.write(SUBJECT, ["one", "two"])
            with application.engine.begin() as connection:
                connection.exec_driver_sql(f"UPDATE {application.table} SET status = -2, reason = 'too many errors'")
            application.write_rows(["poison"])
            register(cluster, application.source)
            until(lambda: application.count("status = -2") == 3, "the poison is parked, too")
            url = application.source.url
            assert url in tool("ListDbs").stdout and application.table in tool("ListDbs").stdout
            assert f"127.0.0.1:{watchdog.port}" in tool("ListWatchdogs").stdout

            shown = tool("OutboxStuck").stdout
            assert "3 parked" in shown and "too many errors" in shown and "two" in shown
            answer = json.loads(tool("OutboxStuck", "--json").stdout)
            ids = {row["messageId"]: row["id"] for row in answer["databases"][0]["rows"]}
            [reconciled] = json.loads(tool("OutboxReconcile", "--json", older=0).stdout)["databases"]
            found = {row["messageId"]: row["log"] for row in reconciled["rows"]}
            assert found == {"one": "notInLog", "two": "notInLog", "": "unchecked"}
            assert "2 are in none, 1 could not be checked" in tool("OutboxReconcile", older=0).stdout

            viewer = cluster.manage("AddToken", name="eve", role="viewer")["token"]
            assert tool("OutboxStuck", token=viewer).returncode == DONE
            refused = tool("OutboxRetry", "--yes", token=viewer)
            assert refused.returncode == REFUSED and "operator" in refused.stderr
            assert tool("OutboxStuck", token="qmq_x_" + "0" * 64).returncode != DONE
            wrong = tool("OutboxRetry", "--yes", database="mmm://nowhere:1")
            assert wrong.returncode == REFUSED and url in wrong.stderr

            [asked] = cluster.manage("OutboxStuck")["databases"]
            assert (asked["room"], asked["database"], asked["parked"]) == ("default", url, 3)
            two = cluster.manage("OutboxRetry", database=url, ids=ids["two"])
            assert two == {"retried": {url: 1}, "notAsked": {}}
            until(lambda: application.count("1 = 1") == 2, "it is sent and deleted, by way of the metaserver")
            assert _retries_done(cluster) == 1

            dry = tool("OutboxRetry", "--dry-run")
            assert dry.returncode == DONE and application.count("status = -2") == 2
            one = tool("OutboxRetry", "--yes", database=url, ids=ids["one"])
            assert one.returncode == DONE and "1 rows are to be sent again" in one.stdout
            assert _retries_done(cluster) == 2, "it stands in the audit trail"
            until(lambda: application.count("1 = 1") == 1, "it is sent and deleted")
            assert tool("OutboxRetry", "--yes").returncode == DONE
            until(lambda: application.count("1 = 1") == 1, "the other one, too; the poison is parked again")
            assert sorted(id for _, id in consume_all(cluster, SUBJECT, "g", 2)) == ["one", "two"]
    application.close()


def _retries_done(cluster):
    """How many the audit trail has."""
    return sum(row["result"] == "done" for row in cluster.manage("AuditTrail", name="OutboxRetry")["rows"])
