"""Shell. ScrubReport: asks each copy when its closed segments were last read again, and what that found.

It ends with 0 if all is as it should be, 1 if a copy was damaged or was not read again in time, 3 if a copy, or the
metaserver, did not answer: then nothing is known of that copy, which is no finding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from qmq.tools.address import Address
from qmq.tools.answer import Exit
from qmq.tools.call import CallFailed, post
from qmq.tools.doctor.finding import parse_metrics
from qmq.tools.doctor.probe import Unreachable, read_page
from qmq.tools.session import Session
from qmq.tools.terminal import complain, show

PROBES_AT_ONCE = 32
NIGHT_S = 25 * 3600
"""Since the last report: a night, and what a timer may be late."""
LATE_TIMES = 2
"""A segment is due every `scrub_hours`, and then waits for those before it."""


def run(session: Session) -> Exit:
    words = {"action": "ListBrokers", "details": "true"}
    try:
        answer = post(session.metaserver, session.token, words, timeout_s=session.command.wait_s({}))
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
        return {**row, **judge({}), "why": f"it does not tell its metrics: {page.status}"}
    judged = judge(parse_metrics(page.text))
    return {**row, **judged, "why": "" if judged["everyS"] else "its version does not tell"}


def judge(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Say of one copy's metrics how old its oldest reading is, and whether it was damaged since the last report."""
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
