"""Shell. A real Prometheus beside a real cluster: what it is told, what the pages ask it, and when it alerts.

The rules are those that ship; only their `for` is a fifteenth of what it is, so that minutes are seconds. All else
waits for what Prometheus says.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

import qmq
from qmq.deploy.cluster import PROMETHEUS, Cluster
from qmq.deploy.dashboards.pages import PAGES
from qmq.deploy.processes import ROOT
from qmq.deploy.prometheus.config import RULES, find_targets, write_config
from tests.integration.cluster_world import COPY_SETTINGS, SETTINGS, until
from tests.integration.watchdog_world import KEY, Application, register
from tests.support.ports import free_ports, run_of_ports

SUBJECT = "order.changed"
FASTER = 15
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
NAME = re.compile(r"\b(?:qmq_(?:\(broker\|delayserver\)_)?|process_)[a-z][a-z_]*")


class Textfile(SimpleHTTPRequestHandler):
    """What node_exporter does with the files of its textfile collector: all of them, below /metrics."""

    def do_GET(self):
        text = "".join(path.read_text() for path in sorted(Path(self.directory).glob("*.prom")))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class World:
    """A cluster with its Prometheus, and the nightly jobs of a machine beside it."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        self.textfiles = folder / "textfiles"
        self.textfiles.mkdir()
        self.url = cluster.others[PROMETHEUS]
        server = ThreadingHTTPServer(("127.0.0.1", free_ports(1)[0]), partial(Textfile, directory=str(self.textfiles)))
        Thread(target=server.serve_forever, daemon=True).start()
        self.close = lambda: (server.shutdown(), server.server_close())
        self._configure(f"127.0.0.1:{server.server_port}")

    def _configure(self, node_exporter):
        directory = self.cluster.run_dir / PROMETHEUS
        targets = find_targets(self.cluster.manage)
        write_config(
            directory, targets, token_file=directory / "token", interval_s=1, node_exporters=[node_exporter]
        )  # fmt: skip
        rules = yaml.safe_load(RULES.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"] if "for" in rule):
            number, unit = re.fullmatch(r"(\d+)([mhd])", rule["for"]).groups()
            rule["for"] = f"{int(number) * {'m': 60, 'h': 3600, 'd': 86400}[unit] // FASTER}s"
        (directory / RULES.name).write_text(yaml.safe_dump(rules))
        self.cluster.service(PROMETHEUS).signal(signal.SIGHUP)
        until(
            lambda: self.value('sum(up{kind=~".+"})') == len(targets) == 6, "every process is scraped, with its token"
        )

    def get(self, path, **words):
        with _DIRECT.open(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def value(self, expr):
        found = self.get("query", query=expr)["result"]
        return float(found[0]["value"][1]) if found else None

    def firing(self):
        found = self.get("query", query='ALERTS{alertstate="firing"}')["result"]
        return {(one["metric"]["alertname"], one["metric"].get("role", "")) for one in found}

    def ever_fired(self):
        found = self.get("query", query='count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[10m]))')
        return {one["metric"]["alertname"] for one in found["result"]}

    def nightly(self, name, *command):
        words = ["nightly", "--name", name, "--textfile", str(self.textfiles), "--", *command]
        environ = os.environ | {"QMQ_METASERVER": self.cluster.metaserver, "QMQ_TOKEN": self.cluster.token}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "qmq", *words], cwd=ROOT, env=environ, stdout=log, stderr=log
            )  # fmt: skip

    def ended(self, name, job):
        """Wait for a nightly job; its exit status, and what it said if that is not 0."""
        return job.wait(300) and (job.returncode, (self.folder / f"{name}.log").read_text())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder, first = tmp_path_factory.mktemp("prometheus"), run_of_ports()
    with Cluster(
        folder / "run", groups=("g1",), delay_groups=("d1",), watchdog=True, prometheus=True, broker=SETTINGS,
        delay_server=COPY_SETTINGS, metaserver={"database_timeout_ms": 30_000, "password_keys": [KEY]},
        http_port=first, broker_port=first + 4,
    ) as cluster:  # fmt: skip
        made = World(cluster, folder)
        jobs = {
            "audit": made.nightly("audit", "true"),  # Spark takes its time; test_audit_cluster.py runs it
            "backup": made.nightly(
                "backup", sys.executable, "-m", "qmq", "Backup", f"--file={folder / 'metadata.json'}"
            ),
        }
        try:
            use(made)
            for name, job in jobs.items():
                assert made.ended(name, job) == 0
            until(lambda: made.value("count(qmq_nightly_exit_status == 0)") == 2, "both jobs have ended well")
            yield made
        finally:
            for job in jobs.values():
                job.kill()
                job.wait()
            made.close()


def use(world):
    """Let there be messages of every kind: delivered, delayed, dead, and from an application's outbox."""
    application = Application(f"sqlite:///{world.folder}/shop.db")
    register(world.cluster, application.source)
    application.write(SUBJECT, ["row"])
    asyncio.run(send_and_consume(world.cluster))
    until(lambda: application.count() == 0, "the watchdog has sent the row")
    application.close()
    counted = ["max(qmq_watchdog_rows)", "sum(qmq_delayserver_sent_messages_total)", "sum(qmq_broker_subscriptions)"]
    until(lambda: None not in map(world.value, counted), "Prometheus has seen it")


async def send_and_consume(cluster):
    words = {"metaserver": cluster.metaserver, "token": cluster.token, "app": "test"}
    consumer, left = qmq.Consumer(**words), {*map(str, range(30)), "late", "row"}

    @consumer.listen(SUBJECT, group="g", start="earliest")
    async def on_message(message):
        left.discard(message["n"])
        if not left:
            consumer.stop()
        if message["n"] == "13":
            raise qmq.DeadLetter("an unlucky number")

    async with qmq.Producer(**words) as producer:
        receipts = await producer.send_many([qmq.Message(SUBJECT, {"n": n}) for n in range(30)])
        assert receipts.all_stored
        assert (await producer.send(qmq.Message(SUBJECT, {"n": "late"}), delay=1.0)).is_stored
        async with asyncio.timeout(60):
            await consumer.run()


def names_in(expr):
    """Metrics that an expression reads."""
    for name in NAME.findall(expr):
        if "(broker|delayserver)" in name:
            yield from (name.replace("(broker|delayserver)", kind) for kind in ("broker", "delayserver"))
        else:
            yield name


def expressions():
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return rules, [query.expr for page in PAGES for panel in page.panels for query in panel.queries]


def test_every_metric_of_a_rule_or_a_page_is_one_that_a_process_exports(world):
    exported = set(world.get("metadata"))
    rules, queries = expressions()
    read = {
        re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name) for expr in rules + queries for name in names_in(expr)
    }
    assert len(read) > 40 and read - exported == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_every_query_of_a_page_has_an_answer(world, page):
    for panel in page.panels:
        for query in panel.queries:
            expr = query.expr.replace("$broker_group", ".+").replace("$subject", ".+")
            found = world.get("query_range", query=expr, start=time.time() - 120, end=time.time(), step=2)["result"]
            values = [float(value) for series in found for _, value in series["values"]]
            assert any(map(math.isfinite, values)), f"{page.title}, {panel.title}: {expr} is empty"
    for variable in page.variables:
        assert world.get(f"label/{variable.name}/values", **{"match[]": variable.metric})


def test_a_slave_that_is_killed_is_alerted_by_its_name_and_nothing_else_is(world):
    assert world.ever_fired() == set()
    slave = world.cluster.service(world.cluster.broker("g1", "slave").hostname)
    slave.is_held = True
    world.cluster.kill("g1", "slave")
    until(lambda: world.firing() == {("QmqBrokerDown", "slave")}, "the alert fires")
    stood = 'min_over_time(qmq_broker_readonly{broker_group="g1", reason="slave_down"}[15s]) == 1'
    until(lambda: world.value(f"count({stood})"), "what follows from it has lasted longer than its alert would need")
    assert world.firing() == {("QmqBrokerDown", "slave")}
    slave.is_held = False
    world.cluster.wait_writable("g1")
    until(lambda: world.firing() == set(), "the alert ends by itself")
    assert world.ever_fired() == {"QmqBrokerDown"}


def test_an_audit_with_findings_and_a_night_without_a_watchdog_are_alerted(world):
    assert world.nightly("audit", "sh", "-c", "exit 1").wait(60) == 1
    until(lambda: world.firing() == {("QmqAuditFoundDifferences", "")}, "somebody is told of the findings")
    watchdog = world.cluster.service("watchdog")
    watchdog.is_held = True
    watchdog.signal(signal.SIGTERM)
    expected = {("QmqAuditFoundDifferences", ""), ("QmqNoActiveWatchdog", "")}
    until(lambda: world.firing() == expected, "nobody looks after the outboxes")
    watchdog.is_held = False
    assert world.nightly("audit", "true").wait(60) == 0
    until(lambda: world.firing() == set(), "both are over")
