"""Shell. Snippets of the pages for applications, pasted by a reader with a cluster of `qmq dev`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster_world import shared_cluster
from tests.support.snippets import snippets

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "audit.md": "Spark and directories of brokers: test_log_table",
    "spark.md": "a server of Spark Connect: test_spark_connect",
}
"""Pages with snippets that need more than a cluster, and the tests that run them."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


cluster = shared_cluster(groups=("g1", "g2"), delay_groups=("d1",))


TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(python (\S+)|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def environment(cluster):
    own = {"QMQ_METASERVER": cluster.metaserver, "QMQ_TOKEN": cluster.token, "QMQ_APP": "reader"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | own | {"PYTHONPATH": str(ROOT), "PATH": path}


def test_tutorial_runs_as_typed(cluster, tmp_path):
    """Files are written, commands typed, in their order; a consumer is stopped when it has nothing left."""
    printed, decisions = [], iter((3, 4, 2))
    for _, name, text in BLOCK.findall(TUTORIAL.read_text()):
        if name:
            (tmp_path / name).write_text(text)
            continue
        for line in text.splitlines():
            line += f" {next(decisions)}" if "billing.py" in line else ""
            typed = line.replace("python ", f"{sys.executable} -m tests.support.snippets ", 1)
            ran = subprocess.run(
                typed, shell=True, cwd=tmp_path, env=environment(cluster), capture_output=True, text=True, timeout=300
            )
            assert ran.returncode == 0, line + ran.stdout + ran.stderr
            printed.append(ran.stdout)
    first, bills, _, retried, dead, outbox, bill, cancelled = printed
    assert first.count("stored") == 3 and bills.count("bill for order") == 3
    assert "bill for order 6 after 2 attempts" in retried
    assert "a price below 0" in dead and "number" in dead
    assert "neither row nor message" in outbox and "bill for order 7 after 2" in bill and "order 8" not in bill
    assert "cancelled" in cancelled.lower()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page) and page.name not in ELSEWHERE], ids=lambda page: page.stem
)
def test_snippets_run_as_pasted(cluster, page, tmp_path):
    command = [sys.executable, "-W", "error", "-m", "tests.support.snippets", str(page)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment(cluster), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
