"""Shell. Snippets of the pages for applications, pasted by a reader with a cluster of `qmq dev`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster_world import running
from tests.support.snippets import snippets

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "audit.md": "Spark and directories of brokers: test_log_table",
    "spark.md": "a server of Spark Connect: test_spark_connect",
}
"""Pages whose snippets need more than a cluster, and the tests that run them."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), groups=("g1", "g2"), delay_groups=("d1",)) as cluster:
        cluster.wait_writable("g1", "g2", "d1")
        yield cluster


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page) and page.name not in ELSEWHERE], ids=lambda page: page.stem
)
def test_snippets_run_as_pasted(cluster, page, tmp_path):
    environ = os.environ | {
        "QMQ_METASERVER": cluster.metaserver,
        "QMQ_TOKEN": cluster.token,
        "QMQ_APP": "reader",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "error", "-m", "tests.support.snippets", str(page)]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
