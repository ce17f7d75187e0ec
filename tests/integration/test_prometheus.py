"""Shell. A real Prometheus beside a real cluster: scraped metrics, queries of the pages, alerts.

The rules are the shipped ones with each time, `for` and ranges, divided by fifteen (`faster`). The tests wait for
answers of Prometheus.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
import yaml

import qmq
from qmq.deploy.cluster import PROMETHEUS
from qmq.deploy.dashboards import PAGES
from qmq.deploy.processes import ROOT
from qmq.deploy.prometheus.config import RULES, find_targets, write_config
from qmq.ledger import PROVEN, Entry, Ledger, write_gauges
from tests.integration.broker_with_triggers import CLOCK_IS_AHEAD
from tests.integration.cluster_world import COPY_SETTINGS, SETTINGS, ObservedCluster, until
from tests.integration.test_gateway import Gateway
from tests.integration.watchdog_world import KEY, Application, register
from tests.support.ports import free_ports, run_of_ports
from tests.support.small_disk import fill, small_disk

SUBJECT = "order.changed"
FASTER = 15
STALLED = "stalled"
"""A consumer group that took one message, acked none, and did not come back."""
GIVES_UP = "g"
"""A consumer group that let one message die."""
ELSEWHERE = f'alertstate="firing", consumer_group!~"{STALLED}|{GIVES_UP}"'
NAMED = ("role", "name", "broker_group")
NAME = re.compile(r"\b(?:qmq_(?:\(broker\|delayserver\)_)?|process_)[a-z][a-z_]*")


class Textfile(SimpleHTTPRequestHandler):
    """Textfile collector of node_exporter: all files, at /metrics."""

    def do_GET(self):
        text = "".join(path.read_text() for path in sorted(Path(self.directory).glob("*.prom")))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def faster(text):
    number, unit = re.fullmatch(r"(\d+)([mhd])", text).groups()
    return f"{int(number) * {'m': 60, 'h': 3600, 'd': 86400}[unit] // FASTER}s"


class World:
    """A cluster with its Prometheus, and the nightly jobs of a machine beside it."""

    def __init__(self, cluster, folder, gateway):
        self.cluster, self.folder, self.gateway = cluster, folder, gateway
        self.textfiles = folder / "textfiles"
        self.textfiles.mkdir()
        self.url = cluster.others[PROMETHEUS]
        server = ThreadingHTTPServer(("127.0.0.1", free_ports(1)[0]), partial(Textfile, directory=str(self.textfiles)))
        Thread(target=server.serve_forever, daemon=True).start()
        self.close = lambda: (server.shutdown(), server.server_close())
        self.first_targets = json.loads((cluster.run_dir / PROMETHEUS / "qmq.targets.json").read_text())
        self._configure(f"127.0.0.1:{server.server_port}")

    def _configure(self, node_exporter):
        directory = self.cluster.run_dir / PROMETHEUS
        targets = find_targets(self.cluster.manage, gateways=[f"127.0.0.1:{self.gateway.port}"])
        write_config(directory, targets, token_file=directory / "token", interval_s=1, node_exporters=[node_exporter])
        rules = yaml.safe_load(RULES.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule["for"] = faster(rule.get("for", "0m"))
            rule["expr"] = re.sub(r"\[(\d+[mhd])\]", lambda found: f"[{faster(found[1])}]", rule["expr"])
        (directory / RULES.name).write_text(yaml.safe_dump(rules))
        self.cluster.service(PROMETHEUS).signal(signal.SIGHUP)
        until(
            lambda: self.value('sum(up{kind=~".+"})') == len(targets) == 7, "every process is scraped, with its token"
        )

    def get(self, path, **words):
        return httpx.get(f"{self.url}/api/v1/{path}", params=words, timeout=30).json()["data"]

    def value(self, expr):
        found = self.get("query", query=expr)["result"]
        return float(found[0]["value"][1]) if found else None

    def firing(self):
        """Alerts that fire, each with the role, group or job that it names; without those of STALLED and GIVES_UP,
        which are there from the beginning."""
        found = self.get("query", query=f"ALERTS{{{ELSEWHERE}}}")["result"]
        return {
            (alert["metric"]["alertname"], next(filter(None, map(alert["metric"].get, NAMED)), "")) for alert in found
        }

    def ever_fired(self):
        expr = f"count by (alertname) (count_over_time(ALERTS{{{ELSEWHERE}}}[10m]))"
        return {alert["metric"]["alertname"] for alert in self.get("query", query=expr)["result"]}

    def nightly(self, name, *command):
        words = ["nightly", "--name", name, "--textfile", str(self.textfiles), "--", *command]
        environ = os.environ | {"QMQ_METASERVER": self.cluster.metaserver, "QMQ_TOKEN": self.cluster.token}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "qmq", *words], cwd=ROOT, env=environ, stdout=log, stderr=log
            )

    def ended(self, name, job):
        """Wait for a nightly job; return 0, or its exit status and log."""
        return job.wait(300) and (job.returncode, (self.folder / f"{name}.log").read_text())


@pytest.fixture(scope="module")
def world(tmp_path_factory, mariadb):
    folder, first = tmp_path_factory.mktemp("prometheus"), run_of_ports()
    metaserver = {"database": mariadb.create_database(), "database_timeout_ms": 30_000, "password_keys": [KEY]}
    metaserver["snapshot"] = str(folder / "snapshot")  # else it is in the working directory, for the next run to find
    metaserver["audit_ledger"] = str(folder / "ledger")
    ledger = Ledger(folder / "ledger")
    ledger.append(Entry("night", time.time_ns() // 1_000_000, "g1", PROVEN, verified=4096))
    with (
        ObservedCluster(
            folder / "run",
            groups=("g1",),
            delay_groups=("d1",),
            watchdog=True,
            prometheus=True,
            broker=SETTINGS,
            delay_server=COPY_SETTINGS,
            metaserver=metaserver,
            http_port=first,
            broker_port=first + 4,
        ) as cluster,
        Gateway(cluster, folder) as gateway,
    ):
        made = World(cluster, folder, gateway)
        write_gauges(made.textfiles / "qmq_audit.prom", ledger, now_ms=time.time_ns() // 1_000_000)
        jobs = {
            "audit": made.nightly("audit", "true"),  # Spark takes its time; test_audit_cluster.py runs it
            "backup": made.nightly(
                "backup",
                "sh",
                "-c",
                f"F={folder}/b.json; {sys.executable} -m qmq Backup --file=$F && {sys.executable} -m qmq try-backup $F",
            ),
            "scrub": made.nightly("scrub", sys.executable, "-m", "qmq", "ScrubReport"),
        }
        try:
            use(made)
            for name, job in jobs.items():
                assert made.ended(name, job) == 0
            until(lambda: made.value("count(qmq_nightly_exit_status == 0)") == 3, "all jobs have ended well")
            yield made
        finally:
            for job in jobs.values():
                job.kill()
                job.wait()
            made.close()


def use(world):
    """Make messages of each kind: delivered, delayed, dead, and from an application's outbox."""
    sent = world.gateway.post("gateway/messages", {"properties": {"n": "1"}})
    assert sent.status_code == 201, sent.text
    assert world.gateway.ack("gateway", world.gateway.pull("gateway", 1)).status_code == 200
    application = Application(f"sqlite:///{world.folder}/shop.db")
    register(world.cluster, application.source)
    application.write(SUBJECT, ["row"])
    asyncio.run(send_and_consume(world.cluster))
    asyncio.run(stall(world.cluster))
    until(lambda: application.count() == 0, "the watchdog has sent the row")
    application.close()
    counted = ["max(qmq_watchdog_rows)", "sum(qmq_delayserver_sent_messages_total)", "sum(qmq_broker_subscriptions)"]
    counted.append("sum(qmq_gateway_decisions_total)")
    until(lambda: None not in map(world.value, counted), "Prometheus has seen it")


async def send_and_consume(cluster):
    words = {"metaserver": cluster.metaserver, "token": cluster.token, "app": "test"}
    consumer, left = qmq.Consumer(**words), {*map(str, range(30)), "late", "row"}

    @consumer.listen(SUBJECT, group=GIVES_UP, start="earliest")
    async def on_message(message):
        left.discard(message["n"])
        if not left:
            consumer.stop()
        if message["n"] == "13":
            raise qmq.DeadLetter("an unlucky number")

    async with qmq.Producer(**words) as producer:
        receipts = await producer.send_many([qmq.Message(SUBJECT, {"n": str(n)}) for n in range(30)])
        assert receipts.all_stored
        assert (await producer.send(qmq.Message(SUBJECT, {"n": "late"}), delay=1.0)).is_stored
        async with asyncio.timeout(60):
            await consumer.run()


async def stall(cluster):
    words = {"metaserver": cluster.metaserver, "token": cluster.token, "app": "test"}
    async with qmq.Consumer(**words).pull(SUBJECT, group=STALLED, start="earliest") as puller:
        assert await puller.pull(1, timeout=60)


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


def test_all_processes_are_scraped_from_the_start(world):
    """A fixed bug: a master that registered after Prometheus started was reported as missing."""
    kinds = sorted(target["labels"]["kind"] for target in world.first_targets)
    assert kinds == ["broker"] * 2 + ["delayserver"] * 2 + ["metaserver", "watchdog"]


def test_every_metric_of_a_rule_is_exported(world):
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
            expr = chosen(query.expr)
            found = world.get("query_range", query=expr, start=time.time() - 120, end=time.time(), step=2)["result"]
            values = [float(value) for series in found for _, value in series["values"]]
            assert any(map(math.isfinite, values)), f"{page.title}, {panel.title}: {expr} is empty"
    for variable in page.variables:
        assert world.get(f"label/{variable.name}/values", **{"match[]": chosen(variable.metric)})


def chosen(expr):
    """Return a query of a page that shows the cluster `qmq`, the default."""
    return expr.replace("$broker_group", ".+").replace("$subject", ".+").replace("$cluster", "qmq")


def test_killed_slave_is_alerted_by_name(world):
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


def test_audit_findings_and_missing_watchdog_are_alerted(world):
    assert world.nightly("audit", "sh", "-c", "exit 1").wait(60) == 1
    until(lambda: world.firing() == {("QmqAuditFoundDifferences", "audit")}, "the findings are alerted")
    watchdog = world.cluster.service("watchdog")
    watchdog.is_held = True
    watchdog.signal(signal.SIGTERM)
    expected = {("QmqAuditFoundDifferences", "audit"), ("QmqNoActiveWatchdog", "")}
    until(lambda: world.firing() == expected, "the missing watchdog is alerted")
    watchdog.is_held = False
    assert world.nightly("audit", "true").wait(60) == 0
    until(lambda: world.firing() == set(), "both are over")


@contextmanager
def disk_that_fills(world, name):
    """Put a process's data on a small disk; `fill` of the folder that it gives fills it."""
    service, data = world.cluster.service(name), world.cluster.run_dir / name / "data"
    world.cluster.end(name)
    kept = shutil.move(data, world.folder / "kept")
    with small_disk(data, mib=96):
        shutil.copytree(kept, data, dirs_exist_ok=True)
        world.cluster.begin(name)
        world.cluster.wait_writable()
        yield data
        world.cluster.end(name)
        shutil.copytree(data, kept, dirs_exist_ok=True)
    shutil.rmtree(data)
    shutil.move(kept, data)
    assert service.pid is None
    world.cluster.begin(name)
    world.cluster.wait_writable()


def test_each_fault_has_a_single_alert(world, mariadb):
    """A database that is stopped, a disk that is full, an audit that did not run, a clock that is wrong."""
    cluster = world.cluster
    until(lambda: world.firing() == set(), "all is well")
    master = cluster.broker("g1", "master").hostname
    cluster.end(master)
    cluster.begin_as("tests.integration.broker_with_triggers", master)
    trigger = cluster.settings_file(master).with_name(CLOCK_IS_AHEAD)
    with disk_that_fills(world, cluster.broker("d1", "slave").hostname) as data:
        cluster.wait_writable()
        until(lambda: world.firing() == set(), "all is well again")
        audit = world.textfiles / "qmq_nightly_audit.prom"
        today = audit.read_text()
        alone = {
            ("QmqMetadataDatabaseDown", ""): (mariadb.stop, mariadb.start),
            ("QmqDiskFull", "d1"): (lambda: fill(data), lambda: (data / "filler").unlink()),
            ("QmqClocksDisagree", "g1"): (trigger.touch, trigger.unlink),
            ("QmqNightlyJobMissed", "audit"): (
                lambda: audit.write_text(two_days_old(today)),
                lambda: audit.write_text(today),
            ),
        }
        for alert, (breaks, repairs) in alone.items():
            breaks()
            try:
                until(lambda alert=alert: world.firing() == {alert}, f"{alert} fires, and nothing else")
            finally:
                repairs()
            until(lambda: world.firing() == set(), f"{alert} ends")


def two_days_old(text):
    """Return the metrics of a job that ran two days ago."""
    return re.sub(r"(timestamp_seconds{.*} )(\d+)", lambda found: found[1] + str(int(found[2]) - 2 * 86_400), text)


def test_stuck_consumer_group_is_alerted_by_name(world):
    expr = f'ALERTS{{alertstate="firing", consumer_group="{STALLED}"}}'
    until(lambda: world.get("query", query=expr)["result"], "it fires")
    (found,) = world.get("query", query=expr)["result"]
    assert [found["metric"][name] for name in ("alertname", "subject")] == ["QmqConsumerStalled", SUBJECT]
    assert world.value(f'qmq_broker_oldest_unacked_seconds{{consumer_group="{STALLED}"}}') > 10


def test_the_first_message_that_dies_is_alerted(world):
    expr = f'last_over_time(ALERTS{{alertstate="firing", consumer_group="{GIVES_UP}"}}[10m])'
    until(lambda: world.get("query", query=expr)["result"], "it fires, or did")
    (found,) = world.get("query", query=expr)["result"]
    assert [found["metric"][name] for name in ("alertname", "subject")] == ["QmqDeadLetters", SUBJECT]


@pytest.mark.parametrize("name", ["metaserver", "watchdog", "broker", "delay server"])
def test_signal_changes_the_log_level(world, name):
    group = {"broker": "g1", "delay server": "d1"}.get(name)
    service = world.cluster.service(world.cluster.broker(group, "slave").hostname if group else name)
    for level in ("DEBUG", "INFO"):
        service.signal(signal.SIGUSR1)
        until(lambda level=level: f"log level is now {level}" in service.log.read_text(), f"{name} says so")
    assert service.pid is not None
