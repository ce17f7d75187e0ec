"""Shell. How the audit stands, as its ledger says: for people, for `AuditStatus`, and as gauges for Prometheus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from qmq.ledger import FINDINGS, NOT_READ, PROVEN, Entry, Ledger, known_from
from qmq.textfile import gauge

OLD_S = 36 * 3600
"""A nightly run, and half a day: then nobody has looked for too long."""

Readings = list[tuple[dict[str, str], float]]
"""Labels and values."""

_GAUGES = {
    "qmq_audit_verified_offset": "Offset up to which both copies of the log were read and found equal",
    "qmq_audit_age_seconds": "Time since the run that verified the log last, when this file was written",
    "qmq_audit_verified_timestamp_seconds": "When that run began, since 1970",
    "qmq_audit_run_timestamp_seconds": "When the last run began, whatever came of it",
    "qmq_audit_verdict": "1 for the verdict of the last run",
    "qmq_audit_findings": "Findings of the last run",
    "qmq_audit_unverified_bytes": "Bytes that retention had removed when the last run came, and no run had verified",
}


def status_of(entries: list[Entry], now_ms: int) -> dict[str, Any]:
    """Say how the audit of one broker group stands. `entries` are all of its ledger, at least one."""
    last, known = entries[-1], known_from(entries)
    anchor = known.anchor
    return {
        "group": last.group,
        "verdict": last.verdict,
        "why": last.why,
        "run": last.run,
        "runMs": last.at_ms,
        "verified": anchor.verified if anchor else 0,
        "verifiedRun": anchor.run if anchor else "",
        "verifiedMs": anchor.at_ms if anchor else 0,
        "ageS": (now_ms - anchor.at_ms) // 1000 if anchor else None,
        "subjects": len(anchor.ends) if anchor else 0,
        "found": last.found,
        "findings": last.findings,
        "unverifiedBytes": last.unverified,
        "readBytes": sum(last.read.values()),
        "by": last.by,
        "runs": known.runs,
    }


def all_status(ledger: Ledger, now_ms: int) -> list[dict[str, Any]]:
    """Say so of every broker group of a ledger; raises LedgerDamaged."""
    found = ((ledger.entries(group)) for group in ledger.groups())
    return [status_of(entries, now_ms) for entries in found if entries]


def is_old(row: dict[str, Any]) -> bool:
    """Whether nobody has proven the group of this status for too long."""
    return row["ageS"] is None or row["ageS"] > OLD_S


def readings(status: list[dict[str, Any]]) -> dict[str, tuple[str, Readings]]:
    """Return the status as gauges: the text of help of each, and its readings."""
    found: dict[str, Readings] = {name: [] for name in _GAUGES}
    for one in status:
        group = {"broker_group": one["group"]}
        found["qmq_audit_verified_offset"].append((group, one["verified"]))
        if one["ageS"] is not None:
            found["qmq_audit_age_seconds"].append((group, one["ageS"]))
            found["qmq_audit_verified_timestamp_seconds"].append((group, one["verifiedMs"] / 1000))
        found["qmq_audit_run_timestamp_seconds"].append((group, one["runMs"] / 1000))
        for verdict in (PROVEN, FINDINGS, NOT_READ):
            found["qmq_audit_verdict"].append((group | {"verdict": verdict}, int(one["verdict"] == verdict)))
        found["qmq_audit_unverified_bytes"].append((group, one["unverifiedBytes"]))
        for kind, number in sorted(one["found"].items()):
            found["qmq_audit_findings"].append((group | {"kind": kind}, number))
    return {name: (help_text, found[name]) for name, help_text in _GAUGES.items()}


def gauges(status: list[dict[str, Any]]) -> str:
    """Write the status in Prometheus' text format."""
    return "".join(gauge(name, help_text, values) for name, (help_text, values) in readings(status).items())


def write_gauges(path: Path, ledger: Ledger, *, now_ms: int) -> None:
    """Write the gauges of a ledger into a file of node_exporter's textfile collector, which never sees half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(gauges(all_status(ledger, now_ms)))
    beside.replace(path)
