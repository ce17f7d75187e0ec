"""Shell. Metrics ports of a real cluster: answers to Prometheus and probes, also beside half-open connections."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.integration import cluster_world
from tests.integration.watchdog_world import WatchdogProcess

HALF_OPEN = 300
PROCESS_METRICS = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds"}
DOCUMENTS = ("docs/metrics.md", "docs/watchdog.md", "docs/delay-server.md", "docs/overload.md")


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """HTTP port of each kind of process, and the cluster's token."""
    folder = tmp_path_factory.mktemp("metrics")
    with (
        cluster_world.running(folder, delay_groups=("d1",)) as cluster,
        WatchdogProcess(cluster, folder / "watchdog") as watchdog,
    ):
        cluster.send_all("order.changed", 3)
        yield (
            cluster.token,
            {
                "broker": cluster.broker("g1", "master").metrics_port,
                "slave": cluster.broker("g1", "slave").metrics_port,
                "delayserver": cluster.broker("d1", "master").metrics_port,
                "metaserver": int(cluster.metaserver.rpartition(":")[2]),
                "watchdog": watchdog.port,
            },
        )


def get(port, path, **headers):
    return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, trust_env=False, timeout=60)


def scrape(ports, name):
    """Return a process's metrics, requested as by Prometheus."""
    token, of = ports
    answer = get(of[name], "/metrics", Authorization=f"Bearer {token}")
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("name", ["broker", "slave", "delayserver", "metaserver", "watchdog"])
def test_prometheus_scrapes_each_process(ports, name):
    text = scrape(ports, name)
    promtool = shutil.which("promtool")
    assert promtool, "these tests need Debian's prometheus: apt-get install prometheus"
    checked = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    names = set(re.findall(r"(?m)^(\w+)", text))
    assert names >= PROCESS_METRICS
    process = {"slave": "broker"}.get(name, name)
    assert f"qmq_{process}_info" in names


@pytest.mark.parametrize("name", ["broker", "delayserver", "metaserver", "watchdog"])
def test_every_metric_of_a_process_is_documented(ports, name):
    written = " ".join(Path(path).read_text() for path in DOCUMENTS)
    missing = []
    for full in re.findall(r"(?m)^# TYPE (\w+) ", scrape(ports, name)):
        if not full.startswith("qmq_"):
            continue
        short = "_" + full.split("_", 2)[2]  # documents shorten names of one family to `_rest`
        if full not in written and f"`{short}" not in written:
            if not (name == "delayserver" and f"qmq_broker{short}" in written):
                missing.append(full)
    assert missing == []


@pytest.mark.parametrize("name", ["broker", "slave", "delayserver", "metaserver", "watchdog"])
def test_probes_need_no_token(ports, name):
    _, of = ports
    assert get(of[name], "/health/live").status_code == 200
    assert get(of[name], "/health/ready").status_code == 200
    assert get(of[name], "/metrics").status_code == 401


@pytest.mark.parametrize("name", ["broker", "delayserver", "metaserver", "watchdog"])
def test_half_open_sockets_keep_no_scrape_out(ports, name):
    """A fixed bug: 300 of them made the watchdog answer 503 until its restart."""
    _, of = ports
    half_open = []
    try:
        for _ in range(HALF_OPEN):
            opened = socket.create_connection(("127.0.0.1", of[name]), timeout=60)
            opened.sendall(b"GET /metrics HT")
            half_open.append(opened)
        for _ in range(3):
            scrape(ports, name)
    finally:
        for opened in half_open:
            opened.close()
