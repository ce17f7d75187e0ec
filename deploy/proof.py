"""Shell. The demo's proof: the audit's two jobs, run as processes, and what they found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import HOST
from qmq.deploy.processes import ROOT
from qmq.deploy.rows import Input
from qmq.errors import InvalidRequest

JOB_S = 900.0
JOURNAL = "acknowledged.ndjson"
"""What the producer was told is kept: the audit looks for each of these messages in both copies."""
JAVA_MIN = 17


def require_java() -> None:
    """Raise InvalidRequest if Spark could not start: better before an hour of work than after it."""
    try:
        text = subprocess.run(["java", "-version"], capture_output=True, text=True, timeout=60).stderr
    except OSError:
        text = ""
    found = re.search(r'version "(\d+)', text)
    if found is None or int(found.group(1)) < JAVA_MIN:
        raise InvalidRequest(
            f"the audit runs on Spark, which needs Java {JAVA_MIN} or newer on the PATH "
            f"(Debian: apt-get install openjdk-{JAVA_MIN}-jre-headless)"
        )


@dataclass
class Proof:
    """What the audit says. `findings` is -1 if it could not read the logs."""

    findings: int = -1
    counts_agree: bool = False
    complaints: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)


def prove(cluster: Cluster, source: Input, expected: Counter[str | None], run_dir: Path) -> Proof:
    """Compare both copies of every group's log with Spark, then count the rows in the logs with Spark SQL."""
    proof = Proof()
    _compare_copies(cluster, run_dir, proof)
    _count_rows(cluster, source, expected, run_dir, proof)
    return proof


def _compare_copies(cluster: Cluster, run_dir: Path, proof: Proof) -> None:
    report, result = run_dir / "audit.md", run_dir / "audit.json"
    arguments = ["--journal", str(run_dir / JOURNAL)]
    arguments += ["--report", str(report), "--result", str(result)]
    for group, roles in cluster.describe()["groups"].items():
        arguments += ["--group", group]
        for role in ("master", "slave"):
            arguments += [f"--{role}", f"{HOST}:{roles[role]['control_port']}"]
    job = _run_job("qmq.audit.jobs.consistency", arguments, cluster, run_dir, proof)
    if job.returncode == 2 or not result.exists():
        proof.complaints.append(f"the audit could not read the logs: {_last_line(job.stderr)}")
        return
    proof.findings = int(json.loads(result.read_text())["findings"])
    if proof.findings or job.returncode:
        proof.complaints.append(f"the audit has {proof.findings} findings (exit status {job.returncode}); see {report}")


def _count_rows(cluster: Cluster, source: Input, expected: Counter[str | None], run_dir: Path, proof: Proof) -> None:
    arguments = ["--sql", counting_sql(source), "--json"]
    for roles in cluster.describe()["groups"].values():
        arguments += ["--source", f"{HOST}:{roles['master']['control_port']}"]
    job = _run_job("qmq.audit.jobs.query", arguments, cluster, run_dir, proof)
    if job.returncode:
        proof.complaints.append(f"the SQL query failed: {_last_line(job.stderr)}")
        return
    counted = {row.get("value"): row["messages"] for row in json.loads(job.stdout)}
    differing = {value for value in {*counted, *expected} if counted.get(value, 0) != expected[value]}
    proof.counts_agree = not differing
    for value in sorted(differing, key=str)[:5]:
        proof.complaints.append(
            f"{source.counted} {value}: {counted.get(value, 0)} messages logged, {expected[value]} rows in the file"
        )


def counting_sql(source: Input) -> str:
    """The query whose answer the file knows as well."""
    column, subject = (text.replace("\\", "\\\\").replace("'", "\\'") for text in (source.counted, source.subject))
    return (
        f"SELECT properties['{column}'] AS value, count(*) AS messages FROM messages "
        f"WHERE subject = '{subject}' GROUP BY 1"
    )


def _run_job(
    module: str, arguments: list[str], cluster: Cluster, run_dir: Path, proof: Proof
) -> subprocess.CompletedProcess[str]:
    began = time.monotonic()
    job = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        env=os.environ | {"QMQ_TOKEN": cluster.token},
    )
    name = module.rpartition(".")[2]
    (run_dir / "logs" / f"{name}.log").write_text(job.stderr)
    proof.times[f"Spark job {name}, its start included"] = time.monotonic() - began
    return job


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
