"""Core. Commands for the results of audit and scrubs, and for searches in the logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from qmq.ledger import FINDINGS, OLD_S, PROVEN, is_old
from qmq.tools.command import ANY_SUBJECT, Command, Kind, Option, bad, good, warning
from qmq.tools.commands.messages import ID, PROPERTY, SINCE, TAG, UNTIL
from qmq.tools.table import Block, Cell, Column, Table


def _verdict(row: Mapping[str, Any]) -> Cell:
    text = row["verdict"]
    return good(text) if text == PROVEN else bad(text) if text == FINDINGS else warning(text)


def _age(row: dict[str, Any]) -> Cell:
    if row["ageS"] is None:
        return bad("never")
    hours, seconds = divmod(row["ageS"], 3600)
    text = f"{hours} h {seconds // 60} min ago"
    return warning(text) if is_old(row) else good(text)


def _found(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(row["found"].items())) or row["why"]


def show_status(rows: list[dict[str, Any]]) -> Iterable[Block]:
    """Yield the audit status of each broker group."""
    columns = (
        Column("BROKER GROUP", "group"),
        Column("VERIFIED UP TO", "verified"),
        Column("WHEN", _age),
        Column("LAST RUN", _verdict),
        Column("AT", "run", drop=1),
        Column("FOUND", _found, fold=20),
        Column("BYTES READ", "readBytes", drop=2),
        Column("BY", "by", drop=3),
    )
    yield Table(columns, rows, empty="no broker group was audited with this ledger")
    nights = [row for row in rows if row["verdict"] != PROVEN]
    old = [row for row in rows if row["verdict"] == PROVEN and is_old(row)]
    if nights or old:
        yield ""
    if nights:
        yield bad(f"{len(nights)} of {len(rows)} broker groups are not proven equal")
    if old:
        yield bad(
            f"{len(old)} of {len(rows)} broker groups were proven equal, but not in the last {OLD_S // 3600} hours"
        )
    if rows and not nights and not old:
        newest = datetime.fromtimestamp(max(row["runMs"] for row in rows) / 1000, UTC)
        yield good(f"all proven equal; last run {newest:%Y-%m-%d %H:%M} UTC")


def _read_again(row: Mapping[str, Any]) -> Cell:
    if row["why"]:
        return warning(f"not known: {row['why']}")
    text = f"{row['oldestS'] / 3600:.1f} h ago, due every {row['everyS'] / 3600:g} h"
    return warning(text) if row["late"] else good(text)


def _damage(row: Mapping[str, Any]) -> Cell:
    text = f"{row['findings']} since its start"
    return bad(f"{text}, the last one since the report before") if row["damaged"] else good(text)


def show_scrubs(rows: list[dict[str, Any]]) -> Iterable[Block]:
    """Yield the scrub status of each copy."""
    columns = (
        Column("BROKER GROUP", "group"),
        Column("COPY", "copy"),
        Column("ROLE", "role", drop=1),
        Column("OLDEST READING", _read_again, fold=20),
        Column("DAMAGE FOUND", _damage),
        Column("BYTES READ", "readBytes", drop=2),
    )
    yield Table(columns, rows, empty="no broker is added")
    yield ""
    wrong = sum(row["damaged"] or row["late"] for row in rows)
    silent = sum(row["why"] != "" for row in rows)
    if wrong:
        yield bad(f"{wrong} of {len(rows)} copies were damaged, or are late with their scrub")
    if silent:
        yield warning(f"{silent} of {len(rows)} copies did not answer")
    if not wrong and not silent and rows:
        yield good("all copies are scrubbed in time, none was damaged")


_SOURCES = (
    Option(
        "source",
        "instead of a metaserver: data directories, or HOST:CONTROLPORT of brokers, with commas; "
        "one copy per broker group",
        default="",
        local=True,
    ),
    Option("sparkMaster", "spark://host:port, yarn, …; default: this machine", default="", local=True),
)


def _filter_fault(arguments: Mapping[str, str]) -> str:
    return (
        "" if {"id", "property", "tag", "since", "until"} & arguments.keys() else "no filter: --help lists the options"
    )


AUDIT = (
    Command(
        "AuditStatus",
        "show how far each log is verified, when, and the last findings. "
        "Reads the audit's ledger on this machine; ends with 1 if a group is not proven equal, "
        "or was not within 36 hours",
        "--ledger=/var/lib/qmq/audit",
        (
            Option("ledger", "directory of the audit's ledger (docs/audit.md)", local=True),
            Option("brokerGroup", "only this broker group", default="", local=True),
            Option(
                "metrics",
                "write the gauges of all groups into this file, for node_exporter's textfile collector",
                default="",
                kind=Kind.PATH,
                local=True,
            ),
        ),
        show_status,
        runs="qmq.tools.verification:audit_status",
        is_local=True,
    ),
    Command(
        "ScrubReport",
        "show the scrub results of all copies. "
        "Ends with 1 if one was damaged since yesterday, or is late with its scrub; with 3 if one does not answer",
        "",
        (),
        show_scrubs,
        runs="qmq.tools.verification:scrub_report",
    ),
    Command(
        "Trail",
        "trace a message in the logs: storage, deliveries, acks. Reads the logs with Spark",
        "--id=1d35f9f0a3",
        (Option("id", "id of the message"), ANY_SUBJECT, *_SOURCES),
        runs="qmq.tools.verification:read_logs",
        is_local=True,
    ),
    Command(
        "FindMessage",
        "find messages in the logs of all subjects, dead letters included. Reads the logs with Spark; "
        "Browse looks at one subject of running brokers",
        "--property orderNo=42 --since=24h",
        (
            ID,
            PROPERTY,
            TAG,
            ANY_SUBJECT,
            SINCE,
            UNTIL,
            Option("limit", "at most this many messages, the oldest ones", "1000", Kind.NUMBER),
            *_SOURCES,
        ),
        runs="qmq.tools.verification:read_logs",
        is_local=True,
        fault_of=_filter_fault,
    ),
)
