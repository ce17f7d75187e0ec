"""Core. Commands for delayed messages: counts, lists, cancellation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qmq.tools.command import bad, good, of_action, warning
from qmq.tools.table import Block, Cell, Column, Table, moment, size, span, utc


def _stats(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("GROUP", "brokerGroup"),
            Column("PENDING", "pendingMessages"),
            Column("SIZE", lambda row: size(row["pendingBytes"]), drop=3),
            Column("LOADED", "loadedMessages", drop=2),
            Column("DUE", _due),
            Column("SINCE", lambda row: span(row["dueAgeMs"]) if row["dueMessages"] else "", drop=3),
            Column("UNDER WAY", _under_way, fold=12),
            Column("NEXT DUE", lambda row: utc(row["nextDue"]) if row["nextDue"] else "", drop=1),
            Column("CLOCK", _clock, drop=4),
        ),
        data["groups"],
        empty="no group of delay servers answered",
    )
    for group in data["groups"]:
        for subject in group["waiting"]:
            if subject["why"]:
                waiting = f"{subject['messages']:,} of {subject['subject']} wait, for {span(subject['ageMs'])}"
                yield warning(f"{group['brokerGroup']}: {waiting}: {subject['why']}")
    if data["hours"]:
        yield ""
        yield Table((Column("HOUR", moment("begin")), Column("MESSAGES", "messages")), data["hours"])
    yield from _unasked(data)


def _due(row: Mapping[str, Any]) -> Cell:
    messages = row["dueMessages"]
    return warning(f"{messages:,}") if messages else good("0")


def _under_way(row: Mapping[str, Any]) -> list[str]:
    return [f"{name} {messages:,}" for name, messages in sorted(row["inFlight"].items())]


def _clock(row: Mapping[str, Any]) -> Cell:
    off_ms = row["clockOffMs"]
    return bad(f"off by {span(abs(off_ms))}") if abs(off_ms) > 1000 else good("agrees")


def _unasked(data: Mapping[str, Any]) -> Iterable[Block]:
    for name, why in (data.get("unasked") or {}).items():
        yield warning(f"not asked: {name}, {why}")


def _listed(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("DUE", moment("due")),
            Column("SUBJECT", "subject"),
            Column("ID", lambda row: row["problem"] or row["id"], fold=12),
            Column("KEY", "key", drop=2, fold=12),
            Column("BYTES", "bytes", drop=3),
            Column("GROUP", "brokerGroup", drop=1),
        ),
        data["messages"],
        empty="no such message pends",
    )
    if data["more"]:
        yield "there are more: go on with --since, or raise --limit"
    yield from _unasked(data)


def _schedules(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("NEXT", moment("next")),
            Column("SUBJECT", "subject"),
            Column("NAME", "name", fold=16),
            Column("OWNER", "owner"),
            Column("CRON", "cron", fold=12),
            Column("ZONE", "timezone", drop=1),
            Column("GROUP", "brokerGroup", drop=2),
        ),
        data["schedules"],
        empty="there is no such schedule",
    )
    if data["more"]:
        yield "there are more: name a subject or an owner"
    yield from _unasked(data)


_FATES = {"cancelled": good("cancelled"), "sent": bad("was sent already"), "unknown": bad("unknown")}


def _cancelled(data: Any) -> Iterable[Block]:
    rows = [
        {"what": what, "name": name, "fate": fate}
        for what, fates in (("id", data["ids"]), ("key", data["keys"]))
        for name, fate in fates.items()
    ]
    yield Table((Column("", "what"), Column("MESSAGE", "name", fold=16), Column("BECAME", _fate)), rows)
    yield from _unasked(data)


def _fate(row: Mapping[str, Any]) -> Cell:
    return _FATES.get(row["fate"], Cell(row["fate"]))


DELAYS = (
    of_action("DelayStats", "--hours=24", _stats),
    of_action("ListDelayed", "--subject=order.unpaid --until=+2h", _listed),
    of_action("ListSchedules", "--subject=report.nightly", _schedules),
    of_action(
        "CancelDelayed",
        "--subject=order.unpaid --ids=20261121T120000.10.0.0.7.42.1",
        _cancelled,
        look="ListDelayed --subject={subject}",
    ),
)
