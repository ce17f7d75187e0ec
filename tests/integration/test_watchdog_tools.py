"""Shell. tools.sh OutboxStuck, OutboxRetry and OutboxReconcile, against a real watchdog."""

from __future__ import annotations

import json

from tests.integration.cluster_world import running, until
from tests.integration.tools_world import DONE, REFUSED, UNREACHABLE
from tests.integration.watchdog_world import Application, WatchdogProcess, register

SUBJECT = "order.paid"


def test_operators_find_and_resend_stuck_rows(tmp_path):
    application = Application(f"sqlite:///{tmp_path}/shop.db")
    with running(tmp_path / "cluster") as cluster:
        nobody = cluster.tool("OutboxStuck")
        assert nobody.returncode == UNREACHABLE and "no watchdog of the room 'default' is active" in nobody.stderr
        with WatchdogProcess(cluster, tmp_path) as watchdog:
            until(lambda: watchdog.is_leader, "it leads")
            assert "no database is registered" in cluster.tool("OutboxStuck").stdout
            register(cluster, application.source)
            application.write(SUBJECT, ["sent"])
            until(lambda: application.count("1 = 1") == 0, "the row is sent and deleted")
            with application.engine.begin() as connection:
                application.write_to(connection, SUBJECT, ["sent", "one", "two"])
                connection.exec_driver_sql(f"UPDATE {application.table} SET status = -2, reason = 'too many errors'")
            application.write_rows(["poison"])
            until(lambda: application.count("status = -2") == 4, "the poison is parked")
            url = application.source.url
            assert url in cluster.tool("ListDbs").stdout and application.table in cluster.tool("ListDbs").stdout
            assert f"127.0.0.1:{watchdog.port}" in cluster.tool("ListWatchdogs").stdout

            shown = cluster.tool("OutboxStuck").stdout
            assert "4 parked" in shown and "too many errors" in shown and "two" in shown
            answer = json.loads(cluster.tool("OutboxStuck", "--json").stdout)
            ids = {row["messageId"]: row["id"] for row in answer["databases"][0]["rows"]}
            [reconciled] = json.loads(cluster.tool("OutboxReconcile", "--json", older=0).stdout)["databases"]
            found = {row["messageId"]: row["log"] for row in reconciled["rows"]}
            assert found == {"sent": "inLog", "one": "notInLog", "two": "notInLog", "": "unchecked"}
            assert "2 are in none, 1 could not be checked" in cluster.tool("OutboxReconcile", older=0).stdout

            viewer = cluster.manage("AddToken", name="eve", role="viewer")["token"]
            assert cluster.tool("OutboxStuck", token=viewer).returncode == DONE
            refused = cluster.tool("OutboxRetry", "--yes", token=viewer)
            assert refused.returncode == REFUSED and "operator" in refused.stderr
            assert cluster.tool("OutboxStuck", token="qmq_x_" + "0" * 64).returncode != DONE
            wrong = cluster.tool("OutboxRetry", "--yes", database="mmm://nowhere:1")
            assert wrong.returncode == REFUSED and url in wrong.stderr

            [asked] = cluster.manage("OutboxStuck")["databases"]
            assert (asked["room"], asked["database"], asked["parked"]) == ("default", url, 4)
            two = cluster.manage("OutboxRetry", database=url, ids=ids["two"])
            assert two == {"retried": {url: 1}, "notAsked": {}}
            until(lambda: application.count("1 = 1") == 3, "the row is sent and deleted")
            assert _retries_done(cluster) == 1

            dry = cluster.tool("OutboxRetry", "--dry-run")
            assert dry.returncode == DONE and application.count("status = -2") == 3
            one = cluster.tool("OutboxRetry", "--yes", database=url, ids=ids["one"])
            assert one.returncode == DONE and "1 rows are to be sent again" in one.stdout
            assert _retries_done(cluster) == 2, "the audit trail has the retry"
            until(lambda: application.count("1 = 1") == 2, "the row is sent and deleted")
            assert cluster.tool("OutboxRetry", "--yes").returncode == DONE
            until(lambda: application.count("1 = 1") == 1, "the poison alone is parked again")
            got = sorted(id for _, id in cluster.consume_all(SUBJECT, "g", 4))
            assert got == ["one", "sent", "sent", "two"]
    application.close()


def _retries_done(cluster):
    """Return the number of retries in the audit trail."""
    return sum(row["result"] == "done" for row in cluster.manage("AuditTrail", name="OutboxRetry")["rows"])
