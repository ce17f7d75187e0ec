"""Shell. AuditStatus, ScrubReport, Trail and FindMessage: results of the audit and of scrubs, and searches in the logs.

ScrubReport ends with 0 if every copy is in order, 1 if a copy was damaged or is late, 3 if a copy or the metaserver did
not answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qmq.access import TOKEN_VARIABLE
from qmq.ledger import PROVEN, Ledger, LedgerDamaged, all_status, is_old, write_gauges
from qmq.tools.call import Address, CallFailed, Exit, post
from qmq.tools.doctor import Unreachable, read_page
from qmq.tools.findings import parse_metrics
from qmq.tools.session import Session
from qmq.tools.terminal import complain, show


def audit_status(session: Session) -> Exit:
    folder, now_ms = Path(session.values["ledger"]), int(time.time() * 1000)
    if not folder.is_dir():
        complain(f"{folder} is no directory")
        return Exit.REFUSED
    try:
        if metrics := session.values["metrics"]:
            write_gauges(Path(metrics), Ledger(folder), now_ms=now_ms)
        wanted = session.values["brokerGroup"]
        rows = [row for row in all_status(Ledger(folder), now_ms) if wanted in ("", row["group"])]
    except (LedgerDamaged, OSError) as error:
        complain(str(error))
        return Exit.REFUSED
    if session.as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(session.command.show(rows), sys.stdout)
    are_proven = bool(rows) and all(row["verdict"] == PROVEN and not is_old(row) for row in rows)
    return Exit.DONE if are_proven else Exit.REFUSED


PROBES_AT_ONCE = 32
NIGHT_S = 25 * 3600
"""A night, with a margin for a late timer."""
LATE_TIMES = 2
"""A segment is due every `scrub_hours`, and waits for the segments before it."""


def scrub_report(session: Session) -> Exit:
    arguments = {"action": "ListBrokers", "details": "true"}
    try:
        answer = post(session.metaserver, session.token, arguments, timeout_s=session.command.wait_s({}))
    except CallFailed as error:
        complain(str(error))
        return Exit.UNREACHABLE
    if answer.exit is not Exit.DONE:
        complain(answer.message)
        return Exit.UNREACHABLE
    with ThreadPoolExecutor(PROBES_AT_ONCE) as threads:
        rows = list(threads.map(partial(_ask, session.token), answer.data))
    if session.as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(session.command.show(rows), sys.stdout)
    if any(row["damaged"] or row["late"] for row in rows):
        return Exit.REFUSED
    return Exit.DONE if rows and all(row["why"] == "" for row in rows) else Exit.UNREACHABLE


def _ask(token: str, broker: Mapping[str, Any]) -> dict[str, Any]:
    row = {"group": broker["group"], "role": broker["role"], "copy": f"{broker['hostname']}:{broker['servePort']}"}
    if not broker["metricsPort"]:
        return {**row, **judge({}), "why": "it never registered"}
    try:
        page = read_page(Address(broker["ip"], broker["metricsPort"]), "/metrics", token)
    except Unreachable as error:
        return {**row, **judge({}), "why": str(error)}
    if page.status != 200:
        return {**row, **judge({}), "why": f"its metrics are not readable: {page.status}"}
    judged = judge(parse_metrics(page.text))
    return {**row, **judged, "why": "" if judged["everyS"] else "its version has no scrub metrics"}


def judge(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the age of a copy's oldest reading, and whether damage was found since the last report."""
    read = {name.partition("_scrub")[2]: value for name, value in metrics.items() if "_scrub" in name}
    oldest_s, every_s = read.get("_oldest_seconds", 0.0), read.get("_every_seconds", 0.0)
    return {
        "oldestS": int(oldest_s),
        "everyS": every_s,
        "late": oldest_s > LATE_TIMES * every_s > 0,
        "findings": int(read.get("_findings_total", 0)),
        "damaged": read.get("_last_finding_seconds", NIGHT_S) < NIGHT_S,
        "readBytes": int(read.get("bed_bytes_total", 0)),
    }


JOBS = {"Trail": "qmq.audit.jobs.trail", "FindMessage": "qmq.audit.jobs.find"}


def read_logs(session: Session) -> Exit:
    if find_spec("pyspark") is None:
        complain("Spark is not installed here: pip install 'qmq[audit]'")
        return Exit.USAGE
    command = [sys.executable, "-m", JOBS[session.command.name], *job_arguments(session)]
    environment = os.environ | ({TOKEN_VARIABLE: session.token} if session.token else {})
    ended = subprocess.run(command, env=environment, check=False).returncode
    return Exit.DONE if ended == 0 else Exit.UNREACHABLE


def job_arguments(session: Session) -> Iterator[str]:
    """Yield the job's arguments. The token is not among them: the process list would show it."""
    values = {name: value for name, value in session.values.items() if value}
    if "source" not in values and session.metaserver is not None:
        yield f"--metaserver={session.metaserver.url}"
    for source in values.pop("source", "").split(","):
        if source:
            yield f"--source={source}"
    for name, value in json.loads(values.pop("property", "{}")).items():
        yield f"--property={name}={value}"
    for tag in values.pop("tag", "").split(","):
        if tag:
            yield f"--tag={tag}"
    for name, value in values.items():
        yield f"--{'spark-master' if name == 'sparkMaster' else name}={value}"
    if session.as_json:
        yield "--json"
